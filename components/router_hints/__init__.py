# SPDX-License-Identifier: Apache-2.0
"""The router: chooses the worker of each request, and which KV blocks are copied there first.

``planner``    the decision, a pure function of what the other modules know (``ways`` to get blocks,
               ``estimates`` of each worker, ``plans`` as they come out, ``turns`` as harnesses announce them)
``index``      where every G2 block is (``table`` holds it, ``inventory`` keeps it in step)
``ledger``     who is busy with what; ``costs`` what things take; ``topology`` how far apart guards are
``workers``    who may get a request (``cards``), ``guards`` which pools there are, ``discovery`` finds both
``placement``  gathers the planner's inputs; ``dispatch`` carries plans out; ``hints`` writes them down
``locations``  tells everyone where blocks are; ``explain`` why a request went where it went, from its
               ``inputs``; ``asking`` is the command for it
``component``  puts it together as a Dynamo component: ``python -m router_hints``
"""
