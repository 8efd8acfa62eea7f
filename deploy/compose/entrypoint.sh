#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Take this role's credentials from the file that `init` made, so that they are in no command line, then run.
set -e
credentials="/run/kvcr/${KVCR_ROLE:-none}.env"
if [ -r "$credentials" ]; then
    set -a
    . "$credentials"
    set +a
fi
exec "$@"
