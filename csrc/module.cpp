// The Python module `headrace._core`: empty. It exists so that packaging builds, ships and finds
// the library; `headrace.native_core` calls the functions in it by ctypes. It keeps to the limited
// API, so one library serves every Python from 3.11 on.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyModuleDef core = {
    PyModuleDef_HEAD_INIT, "_core", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__core() {
    return PyModule_Create(&core);
}
