# SPDX-License-Identifier: Apache-2.0
"""Run a whole deployment on one machine from one YAML file: what ``kvcr serve`` does.

``config`` reads a graph file, ``legacy`` accepts the ones of Dynamo 0.3, ``plan`` turns a graph into
command lines and ports, ``launcher`` brings them up, watches them and takes them down, with ``processes``
and ``infra`` for the children themselves and ``models`` for the weights.
"""
