# SPDX-License-Identifier: Apache-2.0
"""What KVCR processes say to each other, one module per conversation, each with its version.

``engine``  engine process and guard, over a Unix seqpacket socket
``peer``    guard and guard (and router and guard), over a Unix socket or ZMQ
``events``  guard and router to everyone, over NATS
``codec``   how all of them are written on the wire
"""
