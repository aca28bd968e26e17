// A stand-in for libcuda.so.1, the driver. Whoever initialises it is logged; the stand-in of cudart needs nothing of it.
// What torch's libraries are linked with, and no test needs, returns CUDA_ERROR_NOT_SUPPORTED.
#define _GNU_SOURCE
#include <dlfcn.h>

#include "machine.h"

enum { SUCCESS = 0, NOT_SUPPORTED = 801 };

int cuInit(unsigned flags) {
  log_event("cuInit");
  return SUCCESS;
}

int cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION_KNOWN;
  return SUCCESS;
}

int cuDeviceGetCount(int *count) {
  *count = installed_gpus();
  return SUCCESS;
}

int cuDeviceGet(int *device, int index) {
  *device = index;
  return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = 0;
  return SUCCESS;
}

// Says whether a device has a context. torch asks before it switches devices, so as to make none by that
// (c10::cuda::hasPrimaryContext): "standby ranks hold no GPU memory" depends on it.
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  int (*has_context)(int) = NULL;
  void *library = dlopen(CUDART, RTLD_NOLOAD | RTLD_NOW);
  if (library) *(void **)&has_context = dlsym(library, "fakecuda_has_context");
  *flags = 0;
  *active = has_context ? has_context(device) : 0;
  return SUCCESS;
}

int cuCtxGetCurrent(void **context) {
  *context = (void *)1;
  return SUCCESS;
}

int cuCtxSetCurrent(void *context) { return SUCCESS; }

int cuCtxGetDevice(int *device) {
  *device = 0;
  return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
  *text = "simulated driver error";
  return SUCCESS;
}

int cuGetErrorName(int error, const char **text) {
  *text = "CUDA_ERROR_SIMULATED";
  return SUCCESS;
}

int cuPointerGetAttribute(void *value, int attribute, unsigned long long pointer) { return NOT_SUPPORTED; }

static int not_supported(void) { return NOT_SUPPORTED; }

int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long long flags, int *status) {
  void *found = dlsym(RTLD_DEFAULT, symbol);
  if (status) *status = 0;
  *function = found ? found : (void *)not_supported;
  return SUCCESS;
}

int cuGetProcAddress(const char *symbol, void **function, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

#define UNSUPPORTED(name) \
  int name(void) { return NOT_SUPPORTED; }
UNSUPPORTED(cuFuncGetAttribute)
UNSUPPORTED(cuFuncSetAttribute)
UNSUPPORTED(cuGetExportTable)
UNSUPPORTED(cuLaunchCooperativeKernel)
UNSUPPORTED(cuLaunchKernel)
UNSUPPORTED(cuLaunchKernelEx)
UNSUPPORTED(cuLinkAddData)
UNSUPPORTED(cuLinkAddData_v2)
UNSUPPORTED(cuLinkComplete)
UNSUPPORTED(cuLinkCreate)
UNSUPPORTED(cuLinkCreate_v2)
UNSUPPORTED(cuLinkDestroy)
UNSUPPORTED(cuMemcpyDtoH)
UNSUPPORTED(cuModuleGetFunction)
UNSUPPORTED(cuModuleLoadData)
UNSUPPORTED(cuModuleLoadDataEx)
UNSUPPORTED(cuModuleUnload)
UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNSUPPORTED(cuTensorMapEncodeTiled)
