# SPDX-License-Identifier: Apache-2.0
"""What the demo shows, one scene per module. A scene asks questions and returns what was seen."""
