// SPDX-License-Identifier: Apache-2.0
// router_hints._native: the two tight loops of the router. The table is in _table.c.
//
// walk: for each target worker, the runs of blocks it lacks, each from its cheapest holder.
//
// All arguments are C-contiguous buffers; lengths are checked here, so that a wrong call raises ValueError
// and never touches memory it was not given. One thread: everything runs under the GIL.

#define PY_SSIZE_T_CLEAN
#include "_table.h"
#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int32_t first, end;
} run;

typedef struct {
    const char *name;
    Py_ssize_t item;
    int writable;
} argument;

enum { HELD, USABLE, OWN, STARTS, BLOCK_BYTES, QUEUED, RATES, OWN_S, FIRST, END, SOURCE, SECONDS, COUNTS, BUFFERS };

static const argument walk_arguments[BUFFERS] = {
    {"held", 1, 0},          {"usable", 1, 0}, {"own", 4, 0},         {"starts", 4, 0},    {"block_bytes", 8, 0},
    {"queued_bytes", 8, 0},  {"bytes_per_s", 8, 0}, {"own_block_s", 8, 0}, {"out_first", 4, 1}, {"out_end", 4, 1},
    {"out_source", 4, 1},    {"out_seconds", 8, 1}, {"out_counts", 4, 1},
};

PyDoc_STRVAR(walk_doc, "See router_hints.ways: the numpy version there is the specification.");

static PyObject *native_walk(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    Py_buffer v[BUFFERS];
    int taken = 0;
    PyObject *result = NULL;
    run *runs = NULL;
    double *latency = NULL;
    if (nargs != BUFFERS + 1) {
        PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", BUFFERS + 1, nargs);
        return NULL;
    }
    double latency_s = PyFloat_AsDouble(args[8]);
    if (latency_s == -1.0 && PyErr_Occurred())
        return NULL;
    for (; taken < BUFFERS; taken++) {
        const argument *wanted = &walk_arguments[taken];
        int flags = PyBUF_C_CONTIGUOUS | (wanted->writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(args[taken < 8 ? taken : taken + 1], &v[taken], flags) < 0)
            goto done;
        if (v[taken].len % wanted->item) {
            PyErr_Format(PyExc_ValueError, "%s: %zd bytes are not items of %zd", wanted->name, v[taken].len,
                         wanted->item);
            taken++;
            goto done;
        }
    }
    Py_ssize_t sources = v[BLOCK_BYTES].len / 8, targets = v[OWN].len / 4;
    Py_ssize_t blocks = sources ? v[HELD].len / sources : 0;
    Py_ssize_t most = targets ? v[FIRST].len / 4 / targets : 0;
    if (v[HELD].len != sources * blocks || v[USABLE].len != targets * sources || v[STARTS].len != targets * 4
        || v[QUEUED].len != sources * 8 || v[RATES].len != targets * sources * 8 || v[OWN_S].len != targets * 8
        || v[FIRST].len != targets * most * 4 || v[END].len != v[FIRST].len || v[SOURCE].len != v[FIRST].len
        || v[SECONDS].len != targets * most * 8 || v[COUNTS].len != targets * 4 || blocks > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "the arrays of a walk do not fit each other");
        goto done;
    }
    // Runs of each source, once for all targets: at most every other block begins one.
    runs = malloc(sizeof(run) * (size_t)(sources * (blocks / 2 + 1)) + 1);
    latency = malloc((sizeof(double) * 2 + sizeof(Py_ssize_t) * 3) * (size_t)sources + 1);
    if (!runs || !latency) {
        PyErr_NoMemory();
        goto done;
    }
    double *queued = latency + sources;
    Py_ssize_t *begin = (Py_ssize_t *)(queued + sources), *stop = begin + sources, *cursor = stop + sources;
    Py_ssize_t total = 0;
    for (Py_ssize_t s = 0; s < sources; s++) {
        const char *row = (const char *)v[HELD].buf + s * blocks, *at = row, *last = row + blocks;
        begin[s] = total;
        while (at < last && (at = memchr(at, 1, (size_t)(last - at)))) {
            const char *gap = memchr(at, 0, (size_t)(last - at));
            if (!gap)
                gap = last;
            runs[total++] = (run){(int32_t)(at - row), (int32_t)(gap - row)};
            at = gap;
        }
        stop[s] = total;
    }
    const double *block_bytes = v[BLOCK_BYTES].buf;
    for (Py_ssize_t t = 0; t < targets; t++) {
        const uint8_t *usable = (const uint8_t *)v[USABLE].buf + t * sources;
        const double *rates = (const double *)v[RATES].buf + t * sources;
        int32_t own = ((const int32_t *)v[OWN].buf)[t], position = ((const int32_t *)v[STARTS].buf)[t];
        Py_ssize_t count = 0;
        if (own >= sources || position < 0) {
            PyErr_Format(PyExc_ValueError, "target %zd: own row %d, start %d", t, own, position);
            goto done;
        }
        memcpy(queued, v[QUEUED].buf, sizeof(double) * (size_t)sources);
        for (Py_ssize_t s = 0; s < sources; s++) {
            latency[s] = latency_s;
            cursor[s] = begin[s];
        }
        while (position < blocks && count < most) {
            int32_t end = position, limit = (int32_t)blocks, source = -1;
            double seconds = 0, load_s = ((const double *)v[OWN_S].buf)[t];
            if (own >= 0) {
                while (cursor[own] < stop[own] && runs[cursor[own]].end <= position)
                    cursor[own]++;
                if (cursor[own] < stop[own]) {
                    if (runs[cursor[own]].first <= position) {
                        end = runs[cursor[own]].end;
                        seconds = (end - position) * load_s;
                    } else
                        // Up to where the target's own blocks go on: those are cheaper than anybody's.
                        limit = runs[cursor[own]].first;
                }
            }
            if (end == position) {
                double best = DBL_MAX;
                for (Py_ssize_t s = 0; s < sources; s++) {
                    if (!usable[s])
                        continue;
                    while (cursor[s] < stop[s] && runs[cursor[s]].end <= position)
                        cursor[s]++;
                    if (cursor[s] == stop[s] || runs[cursor[s]].first > position)
                        continue;
                    int32_t till = runs[cursor[s]].end < limit ? runs[cursor[s]].end : limit;
                    // What arrives in the pool still has to be loaded, as what was there.
                    double each = latency[s] + (queued[s] + (till - position) * block_bytes[s]) / rates[s]
                        + (till - position) * load_s;
                    // By seconds a block, so that a long run far away competes with a short one nearby.
                    if (each / (till - position) < best) {
                        best = each / (till - position);
                        source = (int32_t)s;
                        end = till;
                        seconds = each;
                    }
                }
                if (source < 0)
                    break;
                // Its queue and its lease are paid for once.
                latency[source] = queued[source] = 0;
            }
            Py_ssize_t at = t * most + count++;
            ((int32_t *)v[FIRST].buf)[at] = position;
            ((int32_t *)v[END].buf)[at] = end;
            ((int32_t *)v[SOURCE].buf)[at] = source;
            ((double *)v[SECONDS].buf)[at] = seconds;
            position = end;
        }
        ((int32_t *)v[COUNTS].buf)[t] = (int32_t)count;
    }
    result = Py_NewRef(Py_None);
done:
    free(runs);
    free(latency);
    while (taken--)
        PyBuffer_Release(&v[taken]);
    return result;
}

static PyMethodDef methods[] = {
    {"walk", (PyCFunction)(void (*)(void))native_walk, METH_FASTCALL, walk_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Tight loops of the router.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    if (PyType_Ready(&router_hints_Table) < 0)
        return NULL;
    PyObject *created = PyModule_Create(&module);
    if (created && PyModule_AddObjectRef(created, "Table", (PyObject *)&router_hints_Table) < 0)
        Py_CLEAR(created);
    return created;
}
