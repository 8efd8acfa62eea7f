# SPDX-License-Identifier: Apache-2.0
"""The guard as a member of a Dynamo deployment. The core runs without this package.

``etcd``       a small client of our own over two libraries
``records``    what a guard says about itself in etcd, signed
``component``  one life of the Dynamo component ``{namespace}.kvcr``
``peers``      the other guards, as their records tell
``publisher``  inventory and heartbeats on NATS
``cluster``    the thread that runs all of it beside a guard
``leases``     telling the deployment that a process is dead, without waiting for its lease
"""
