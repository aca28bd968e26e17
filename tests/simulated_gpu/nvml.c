// A stand-in for libnvidia-ml.so.1: which GPUs there are, who holds how much of them, and how busy they are. It needs no
// CUDA and initialises none, like the real one. torch counts devices through it (torch/cuda/__init__.py,
// _device_count_nvml), the panel measures with it, and `nvidia-smi` of this directory asks it.
#include "machine.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, NOT_AVAILABLE = -1 };
enum { BUSY_PERCENT_PER_GPU = 10 };    // GPU 0 is 10 % busy, GPU 1 20 %, so that a test sees which one was measured

typedef struct {
  unsigned long long total, unused, used;
} memory;

typedef struct {
  unsigned gpu, memory;
} utilization;

typedef struct {
  unsigned pid;
  unsigned long long bytes;
} process_v1;

typedef struct {
  unsigned pid;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
} process_v3;

// A handle is the index of the GPU, plus one: NULL is none.
static int gpu_of(void *handle) { return (int)(long)handle - 1; }

static int give(int gpu, void **handle) {
  if (gpu < 0 || gpu >= installed_gpus()) return INVALID_ARGUMENT;
  *handle = (void *)(long)(gpu + 1);
  return SUCCESS;
}

int nvmlInit(void) { return SUCCESS; }

int nvmlInit_v2(void) { return SUCCESS; }

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int error) { return error == NOT_SUPPORTED ? "Not Supported" : "simulated NVML error"; }

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = CUDA_VERSION_KNOWN;
  return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *text, unsigned length) {
  snprintf(text, length, "580.00");
  return SUCCESS;
}

int nvmlDeviceGetCount(unsigned *count) {
  *count = installed_gpus();
  return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) { return nvmlDeviceGetCount(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return give((int)index, handle); }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  int gpu = strlen(uuid) == 40 ? gpu_by_uuid(uuid) : -1;    // the whole one, where CUDA takes its beginning
  return gpu < 0 ? NOT_FOUND : give(gpu, handle);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **handle) {
  unsigned bus = 0;
  if (sscanf(address, "%*x:%x", &bus) != 1) return INVALID_ARGUMENT;
  return give((int)bus - FIRST_BUS, handle);
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
  snprintf(text, length, UUID_FORMAT, gpu_of(handle));
  return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned length) {
  snprintf(text, length, "Simulated GPU");
  return SUCCESS;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
  *index = gpu_of(handle);
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory *found) {
  holder holders[MAX_HOLDERS];
  int count = holders_of(gpu_of(handle), holders);
  found->total = gpu_memory();
  found->used = 0;
  for (int i = 0; i < count; i++) found->used += holders[i].bytes;
  found->unused = found->used > found->total ? 0 : found->total - found->used;
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, utilization *found) {
  found->gpu = (gpu_of(handle) + 1) * BUSY_PERCENT_PER_GPU;
  found->memory = 0;
  return SUCCESS;
}

// Both forms: too small a buffer is told the size it needs, as pynvml expects at its first call.
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_v3 *found) {
  holder holders[MAX_HOLDERS];
  unsigned number = holders_of(gpu_of(handle), holders), room = *count;
  *count = number;
  if (room < number) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; found && i < number; i++)
    found[i] = (process_v3){holders[i].pid, holders[i].bytes, NOT_AVAILABLE, NOT_AVAILABLE};
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, process_v1 *found) {
  holder holders[MAX_HOLDERS];
  unsigned number = holders_of(gpu_of(handle), holders), room = *count;
  *count = number;
  if (room < number) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; found && i < number; i++) found[i] = (process_v1){holders[i].pid, holders[i].bytes};
  return SUCCESS;
}

int nvmlDeviceGetP2PStatus(void *first, void *second, int index, int *status) {
  *status = 0;    // NVML_P2P_STATUS_OK
  return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, void *type) { return NOT_SUPPORTED; }

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *address) { return NOT_SUPPORTED; }

int nvmlDeviceGetGpuFabricInfoV(void *handle, void *fabric) { return NOT_SUPPORTED; }

// --- what the doctor asks; each answer can be set, for all GPUs or for one: FAKE_NVML_COMPUTE_MODE=3, ..._COMPUTE_MODE_1=3 ---

static unsigned long long told(const char *what, int gpu, unsigned long long usual) {
  char name[96];
  snprintf(name, sizeof name, "FAKE_NVML_%s_%d", what, gpu);
  const char *value = getenv(name);
  if (!value) {
    snprintf(name, sizeof name, "FAKE_NVML_%s", what);
    value = getenv(name);
  }
  return value ? strtoull(value, 0, 10) : usual;
}

int nvmlDeviceGetComputeMode(void *handle, unsigned *mode) {
  *mode = (unsigned)told("COMPUTE_MODE", gpu_of(handle), 0);
  return SUCCESS;
}

int nvmlDeviceGetPersistenceMode(void *handle, unsigned *mode) {
  *mode = (unsigned)told("PERSISTENCE", gpu_of(handle), 1);
  return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, unsigned long long *count) {
  *count = type == 1 ? told("UNCORRECTED", gpu_of(handle), 0) : 0;
  return SUCCESS;
}

int nvmlDeviceGetRetiredPagesPendingStatus(void *handle, unsigned *pending) { return NOT_SUPPORTED; }

int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  *corrected = *uncorrected = 0;
  *pending = (unsigned)told("ROWS_PENDING", gpu_of(handle), 0);
  *failed = (unsigned)told("ROWS_FAILED", gpu_of(handle), 0);
  return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  int capability = (int)told("CAPABILITY", gpu_of(handle), 90);
  *major = capability / 10;
  *minor = capability % 10;
  return SUCCESS;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *up) {
  if (link >= 18) return INVALID_ARGUMENT;
  *up = link < told("LINKS", gpu_of(handle), 18);
  return SUCCESS;
}
