// SPDX-License-Identifier: Apache-2.0
// router_hints._native.Table, for the module that has it.
#pragma once
#include <Python.h>

extern PyTypeObject router_hints_Table;
