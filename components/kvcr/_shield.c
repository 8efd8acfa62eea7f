// SPDX-License-Identifier: Apache-2.0
// kvcr._shield: memory that is lost under a mapping reads as zeros, and does not end the process.
//
// A page of a mapped file that is gone, as its file was truncated or its memory failed, is a SIGBUS for whoever
// touches it: an engine would die of what happened to the pool of another. Zeros are no block: a control word of
// zero is no READY one, and no payload has the checksum that was promised for it.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAPPINGS 16384

typedef struct {
    _Atomic uintptr_t start; // 0: free
    _Atomic uintptr_t end;
} Mapping;

static Mapping mappings[MAPPINGS];
static struct sigaction before;
static uintptr_t page_bytes;

static const Mapping *mapping_of(uintptr_t address)
{
    for (size_t i = 0; i < MAPPINGS; i++) {
        uintptr_t start = atomic_load_explicit(&mappings[i].start, memory_order_acquire);
        if (start && start <= address && address < atomic_load_explicit(&mappings[i].end, memory_order_relaxed))
            return &mappings[i];
    }
    return NULL;
}

// Async-signal-safe: a table of atomics, and system calls. Returning repeats the access.
static void on_sigbus(int number, siginfo_t *info, void *context)
{
    uintptr_t address = (uintptr_t)info->si_addr & ~(page_bytes - 1);
    const Mapping *mapping = info->si_code > 0 ? mapping_of((uintptr_t)info->si_addr) : NULL;
    if (mapping) {
        // Failed memory is a page; of a file that was truncated, everything from here on is gone.
        size_t nbytes = page_bytes;
#ifdef BUS_MCEERR_AR
        if (info->si_code != BUS_MCEERR_AR && info->si_code != BUS_MCEERR_AO)
#endif
            nbytes = atomic_load_explicit(&mapping->end, memory_order_relaxed) - address;
        void *zeros = mmap((void *)address, nbytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        if (zeros != MAP_FAILED)
            return;
    }
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else {
        signal(number, SIG_DFL);
        if (info->si_code <= 0)
            raise(number); // sent by somebody: nothing repeats it
    }
}

static int install(void)
{
    struct sigaction now;
    if (sigaction(SIGBUS, NULL, &now) < 0)
        return -1;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_sigbus)
        return 0;
    if (!page_bytes) {
        page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
        before = now;
    }
    struct sigaction ours = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGBUS, &ours, NULL);
}

PyDoc_STRVAR(shield_doc, "shield(address, nbytes)\n--\n\nWatch over a mapping, where there are not too many. Raises "
                         "OSError.");

static PyObject *shield(PyObject *self, PyObject *args)
{
    unsigned long long address, nbytes;
    if (!PyArg_ParseTuple(args, "KK", &address, &nbytes))
        return NULL;
    if (install() < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    for (size_t i = 0; i < MAPPINGS; i++) {
        if (atomic_load_explicit(&mappings[i].start, memory_order_relaxed))
            continue;
        atomic_store_explicit(&mappings[i].end, (uintptr_t)(address + nbytes), memory_order_relaxed);
        atomic_store_explicit(&mappings[i].start, (uintptr_t)address, memory_order_release);
        break;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(unshield_doc, "unshield(address)\n--\n\nThe mapping there is on its way out.");

static PyObject *unshield(PyObject *self, PyObject *args)
{
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K", &address))
        return NULL;
    for (size_t i = 0; i < MAPPINGS; i++)
        if (atomic_load_explicit(&mappings[i].start, memory_order_relaxed) == (uintptr_t)address)
            atomic_store_explicit(&mappings[i].start, 0, memory_order_release);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"shield", shield, METH_VARARGS, shield_doc},
    {"unshield", unshield, METH_VARARGS, unshield_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "kvcr._shield", "Lost memory reads as zeros. Used by kvcr.pool.mapping only.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__shield(void)
{
    return PyModule_Create(&module);
}
