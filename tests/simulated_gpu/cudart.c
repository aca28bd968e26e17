// A stand-in for libcudart.so.12 and .13. Device memory is host memory, a stream is a thread that does what it is given in order,
// and kernels do nothing, but for the two that torch launches without an operator (fill and _sleep); the operators
// themselves run on the CPU (operators.py). What it keeps of CUDA, because nblaunch depends on it:
//
// * a process initialises CUDA once, reads CUDA_VISIBLE_DEVICES at that moment, and cannot use it after a fork;
// * streams and events are asynchronous, and no signal interrupts a wait for them;
// * an error of a kernel stays: whatever the process asks of CUDA from then on fails with it;
// * all processes share the memory of a GPU, and a context takes some of it.
//
// What only the real library has returns cudaErrorNotSupported (see `build`).
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <signal.h>

#include "machine.h"

#define CHECK_CONTEXT                                                                                                  \
  do {                                                                                                                 \
    cudaError_t checked = initialise();                                                                                \
    if (checked) return checked;                                                                                       \
  } while (0)

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;    // guards what a process has once: devices, blocks, streams

// --- errors ----------------------------------------------------------------------------------------------------------

// A device-side assert, an illegal address or an ECC error is "sticky": the context is lost with all that is in it, and
// the process cannot make another one. torch turns it into torch.AcceleratorError at the call that hears of it first.
static volatile int poisoned;
static __thread cudaError_t last_error;

static cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

static cudaError_t sticky(void) { return poisoned ? failed(cudaErrorAssert) : cudaSuccess; }

// Not of CUDA: what a test calls to have a context that is lost.
void fakecuda_poison(void) { poisoned = 1; }

// cudaGetLastError clears an ordinary error, and never a sticky one (C10_CUDA_CHECK of torch relies on the first).
cudaError_t cudaGetLastError(void) {
  cudaError_t error = poisoned ? cudaErrorAssert : last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return poisoned ? cudaErrorAssert : last_error; }

const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInitializationError: return "cudaErrorInitializationError";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorSimulated";
  }
}

const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported (by the simulated GPU)";
    default: return "simulated error";
  }
}

// --- initialisation, and which GPUs the process sees -------------------------------------------------------------------

static int device_count = -1;      // -1: not initialised
static int physical[MAX_GPUS];     // device of this process -> GPU of the machine
static pid_t initialiser;          // CUDA does not survive a fork: only this process may use it
static int has_context[MAX_GPUS];
static __thread int current_device;

// CUDA's rules (programming guide, "CUDA Environment Variables"): indices or UUIDs, also shortened; whatever follows the
// first entry that names no GPU is invisible; with a GPU twice there is none. torch counts alike without initialising
// CUDA, through NVML (torch/cuda/__init__.py, _parse_visible_devices).
static void read_visible_devices(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  device_count = 0;
  if (!visible) {
    for (int gpu = 0; gpu < installed_gpus(); gpu++) physical[device_count++] = gpu;
    return;
  }
  char *copy = strdup(visible), *rest = copy, *entry;
  int seen[MAX_GPUS] = {0};
  while ((entry = strsep(&rest, ","))) {
    char *end;
    entry += strspn(entry, " ");
    size_t length = strcspn(entry, " ");
    entry[length] = 0;
    int gpu = strncmp(entry, "GPU-", 4) ? (int)strtol(entry, &end, 10) : gpu_by_uuid(entry);
    if (!length || (strncmp(entry, "GPU-", 4) && end == entry)) break;
    if (gpu < 0 || gpu >= installed_gpus()) break;
    if (seen[gpu]++) {
      device_count = 0;
      break;
    }
    physical[device_count++] = gpu;
  }
  free(copy);
}

static cudaError_t initialise(void) {
  pthread_mutex_lock(&registry);
  if (device_count < 0) {
    initialiser = getpid();
    log_event("cuda initialised");
    read_visible_devices();
  }
  pthread_mutex_unlock(&registry);
  if (initialiser != getpid()) return failed(cudaErrorInitializationError);
  if (poisoned) return failed(cudaErrorAssert);
  if (!device_count) return failed(cudaErrorNoDevice);
  return cudaSuccess;
}

// For NCCL's stand-in.
int fakecuda_physical(int device) { return physical[device]; }

// For the driver's: torch asks it whether a device has a context (cuDevicePrimaryCtxGetState), so as not to make one.
int fakecuda_has_context(int device) { return device >= 0 && device < MAX_GPUS && has_context[device]; }

// --- memory ------------------------------------------------------------------------------------------------------------

enum { PINNED = -1, MAX_BLOCKS = 65536 };    // few: torch's allocator asks for 2 or 20 MiB and more at once

typedef struct {
  char *start;
  size_t size;
  int device;    // or PINNED
} block;

static block blocks[MAX_BLOCKS];
static int block_count;
static size_t used[MAX_GPUS];

// Tell the other processes what this one holds.
static void publish(void) {
  char path[PATH_SIZE], made[PATH_SIZE + 8];
  snprintf(path, sizeof path, "%s/mem.%d", state_directory(), getpid());
  snprintf(made, sizeof made, "%s/.mem.%d", state_directory(), getpid());
  FILE *stream = fopen(made, "w");
  if (!stream) return;
  for (int device = 0; device < device_count; device++)
    if (has_context[device]) fprintf(stream, "%d %zu\n", physical[device], used[device] + CONTEXT_BYTES);
  fclose(stream);
  rename(made, path);    // whoever reads meanwhile reads the old one
}

// As of CUDA 12, cudaSetDevice makes the context; before, the first use of the device did.
static void make_context(void) {
  if (has_context[current_device]) return;
  has_context[current_device] = 1;
  publish();
}

static size_t held_by_others(int gpu) {
  holder found[MAX_HOLDERS];
  size_t sum = 0;
  int count = holders_of(gpu, found);
  for (int i = 0; i < count; i++)
    if (found[i].pid != getpid()) sum += found[i].bytes;
  return sum;
}

static size_t taken(void) { return held_by_others(physical[current_device]) + used[current_device] + CONTEXT_BYTES; }

static cudaError_t allocate(void **pointer, size_t size, int device) {
  CHECK_CONTEXT;
  if (device != PINNED) {
    make_context();
    if (taken() + size > gpu_memory()) return failed(cudaErrorMemoryAllocation);
  }
  char *start = aligned_alloc(512, (size + 511) / 512 * 512 + 512);
  if (!start) return failed(cudaErrorMemoryAllocation);
  memset(start, 0xcd, size);    // nobody may rely on zeros
  pthread_mutex_lock(&registry);
  if (block_count == MAX_BLOCKS) {
    fprintf(stderr, "simulated GPU: more than %d blocks of memory\n", MAX_BLOCKS);
    abort();
  }
  blocks[block_count++] = (block){start, size, device};
  if (device != PINNED) {
    used[device] += size;
    publish();
  }
  pthread_mutex_unlock(&registry);
  *pointer = start;
  return cudaSuccess;
}

static cudaError_t release(void *pointer) {
  if (!pointer) return cudaSuccess;
  pthread_mutex_lock(&registry);
  for (int i = 0; i < block_count; i++) {
    if (blocks[i].start != pointer) continue;
    if (blocks[i].device != PINNED) {
      used[blocks[i].device] -= blocks[i].size;
      publish();
    }
    blocks[i] = blocks[--block_count];
    break;
  }
  pthread_mutex_unlock(&registry);
  free(pointer);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t size) { return allocate(pointer, size, current_device); }

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return allocate(pointer, size, PINNED); }

cudaError_t cudaFreeHost(void *pointer) { return release(pointer); }

// cudaFree waits for the device first; NCCL users know it from hangs (nccl issue 549).
cudaError_t cudaFree(void *pointer) {
  if (pointer) cudaDeviceSynchronize();
  return release(pointer);
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  CHECK_CONTEXT;
  make_context();
  size_t now = taken();
  *total = gpu_memory();
  *unused = now > *total ? 0 : *total - now;
  return cudaSuccess;
}

// torch tells pinned memory and a pointer's device by this (CUDAHooks::isPinnedPtr, getDeviceFromPtr).
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  CHECK_CONTEXT;
  memset(attributes, 0, sizeof *attributes);
  pthread_mutex_lock(&registry);
  for (int i = 0; i < block_count; i++) {
    const char *start = blocks[i].start;
    if ((const char *)pointer < start || (const char *)pointer >= start + blocks[i].size) continue;
    attributes->type = blocks[i].device == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = blocks[i].device;
    attributes->devicePointer = (void *)pointer;
  }
  pthread_mutex_unlock(&registry);
  return cudaSuccess;
}

// --- streams -----------------------------------------------------------------------------------------------------------

enum { MAX_STREAMS = 4096 };    // torch takes streams from pools and never gives one back

typedef struct task {
  void (*function)(void *);
  void *argument;
  struct task *next;
} task;

typedef struct {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  task *first, *last;
  int pending;    // with the one that runs
  int started;
} stream;

static stream default_streams[MAX_GPUS];
static stream *streams[MAX_STREAMS];
static int stream_count;

static void prepare(stream *it) {
  pthread_mutex_init(&it->mutex, NULL);
  pthread_cond_init(&it->changed, NULL);
}

__attribute__((constructor)) static void prepare_default_streams(void) {
  for (int i = 0; i < MAX_GPUS; i++) prepare(&default_streams[i]);
}

// 0, 1 and 2 are the handles of the default stream, the legacy one and that of the thread.
static stream *stream_of(cudaStream_t handle) {
  return (uintptr_t)handle <= 2 ? &default_streams[current_device] : (stream *)handle;
}

static void *serve(void *argument) {
  stream *it = argument;
  for (;;) {
    pthread_mutex_lock(&it->mutex);
    while (!it->first) pthread_cond_wait(&it->changed, &it->mutex);
    task *next = it->first;
    it->first = next->next;
    if (!it->first) it->last = NULL;
    pthread_mutex_unlock(&it->mutex);
    next->function(next->argument);
    free(next);
    pthread_mutex_lock(&it->mutex);
    it->pending--;
    pthread_cond_broadcast(&it->changed);
    pthread_mutex_unlock(&it->mutex);
  }
  return NULL;
}

// A GPU takes no signals: they go to the threads of the program.
static void start_serving(stream *it) {
  sigset_t all, before;
  pthread_t thread;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  if (!pthread_create(&thread, NULL, serve, it)) pthread_detach(thread);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  it->started = 1;
}

static void enqueue(cudaStream_t handle, void (*function)(void *), void *argument) {
  stream *it = stream_of(handle);
  task *added = calloc(1, sizeof *added);
  added->function = function;
  added->argument = argument;
  pthread_mutex_lock(&it->mutex);
  if (!it->started) start_serving(it);
  if (it->last)
    it->last->next = added;
  else
    it->first = added;
  it->last = added;
  it->pending++;
  pthread_cond_broadcast(&it->changed);
  pthread_mutex_unlock(&it->mutex);
}

static void drain(stream *it) {
  pthread_mutex_lock(&it->mutex);
  while (it->pending) pthread_cond_wait(&it->changed, &it->mutex);
  pthread_mutex_unlock(&it->mutex);
}

static cudaError_t create_stream(cudaStream_t *handle) {
  CHECK_CONTEXT;
  make_context();
  stream *made = calloc(1, sizeof *made);
  prepare(made);
  pthread_mutex_lock(&registry);
  streams[stream_count++ % MAX_STREAMS] = made;
  pthread_mutex_unlock(&registry);
  *handle = (cudaStream_t)made;
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *handle) { return create_stream(handle); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) { return create_stream(handle); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
  return create_stream(handle);
}

// Work in it still ends, as with CUDA; the thread stays.
cudaError_t cudaStreamDestroy(cudaStream_t handle) { return cudaSuccess; }

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  CHECK_CONTEXT;
  drain(stream_of(handle));
  return sticky();
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  CHECK_CONTEXT;
  return stream_of(handle)->pending ? cudaErrorNotReady : cudaSuccess;
}

// Waits for the streams of every device of the process, where CUDA waits for those of the current one.
cudaError_t cudaDeviceSynchronize(void) {
  CHECK_CONTEXT;
  drain(&default_streams[current_device]);
  for (int i = 0; i < stream_count && i < MAX_STREAMS; i++) drain(streams[i]);
  return sticky();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *argument) {
  CHECK_CONTEXT;
  enqueue(handle, function, argument);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  CHECK_CONTEXT;
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

// No stream is ever being captured: there are no CUDA graphs. torch asks before each collective and each allocation.
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
#if CUDART_VERSION >= 13000
                                     const cudaGraphEdgeData **edges,
#endif
                                     size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

// A device-side assert, at the end of what the stream has to do: CUDA's report of it is asynchronous as well. The
// launch returns, and the next call that asks the device anything hears of it.
static void lose_context(void *argument) {
  struct timespec kernel_runs = {0, 2000000};
  nanosleep(&kernel_runs, NULL);
  poisoned = 1;
}

// Not of CUDA: what operators.py calls where a kernel would assert (an index out of bounds).
void fakecuda_assert_later(cudaStream_t handle) { enqueue(handle, lose_context, NULL); }

// --- events ------------------------------------------------------------------------------------------------------------

// An event is complete when its latest record is. One that was never recorded is complete: torch's CUDAEvent and the
// watchdog of ProcessGroupNCCL ask such ones.
typedef struct {
  pthread_mutex_t mutex;
  pthread_cond_t reached;
  uint64_t recorded, done;
  struct timespec time;
} event;

typedef struct {
  event *of;
  uint64_t number;
} record;

static cudaError_t create_event(cudaEvent_t *handle) {
  CHECK_CONTEXT;
  event *made = calloc(1, sizeof *made);
  pthread_mutex_init(&made->mutex, NULL);
  pthread_cond_init(&made->reached, NULL);
  *handle = (cudaEvent_t)made;
  return cudaSuccess;
}

static record *latest_record(event *of) {
  record *made = malloc(sizeof *made);
  pthread_mutex_lock(&of->mutex);
  *made = (record){of, of->recorded};
  pthread_mutex_unlock(&of->mutex);
  return made;
}

static void reach(void *argument) {
  record *it = argument;
  pthread_mutex_lock(&it->of->mutex);
  if (it->number > it->of->done) it->of->done = it->number;
  clock_gettime(CLOCK_MONOTONIC, &it->of->time);
  pthread_cond_broadcast(&it->of->reached);
  pthread_mutex_unlock(&it->of->mutex);
  free(it);
}

static void await(void *argument) {
  record *it = argument;
  pthread_mutex_lock(&it->of->mutex);
  while (it->of->done < it->number) pthread_cond_wait(&it->of->reached, &it->of->mutex);
  pthread_mutex_unlock(&it->of->mutex);
  free(it);
}

cudaError_t cudaEventCreate(cudaEvent_t *handle) { return create_event(handle); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) { return create_event(handle); }

// Not freed: a task of a stream may still lead to it, which CUDA allows.
cudaError_t cudaEventDestroy(cudaEvent_t handle) { return cudaSuccess; }

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t where) {
  CHECK_CONTEXT;
  event *it = (event *)handle;
  pthread_mutex_lock(&it->mutex);
  it->recorded++;
  pthread_mutex_unlock(&it->mutex);
  enqueue(where, reach, latest_record(it));
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t where, unsigned flags) {
  return cudaEventRecord(handle, where);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  CHECK_CONTEXT;
  event *it = (event *)handle;
  return it->done >= it->recorded ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  CHECK_CONTEXT;
  await(latest_record((event *)handle));
  return sticky();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t where, cudaEvent_t handle, unsigned flags) {
  CHECK_CONTEXT;
  record *it = latest_record((event *)handle);
  if (it->of->done < it->number)
    enqueue(where, await, it);
  else
    free(it);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  const event *first = (event *)from, *second = (event *)to;
  *milliseconds = (second->time.tv_sec - first->time.tv_sec) * 1e3f +
                  (second->time.tv_nsec - first->time.tv_nsec) / 1e6f;
  return cudaSuccess;
}

// --- copies ------------------------------------------------------------------------------------------------------------

typedef struct {
  char *to;
  const char *from;
  size_t size;
  int value;
} transfer;

static void copy(void *argument) {
  transfer *it = argument;
  memmove(it->to, it->from, it->size);
  free(it);
}

static void set(void *argument) {
  transfer *it = argument;
  memset(it->to, it->value, it->size);
  free(it);
}

static void enqueue_transfer(cudaStream_t where, void (*function)(void *), transfer what) {
  transfer *made = malloc(sizeof *made);
  *made = what;
  enqueue(where, function, made);
}

// To and from the host it waits, as CUDA does for pageable memory; for pinned memory CUDA would not.
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t where) {
  CHECK_CONTEXT;
  enqueue_transfer(where, copy, (transfer){to, from, size, 0});
  if (kind != cudaMemcpyDeviceToDevice) drain(stream_of(where));
  return sticky();
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  cudaError_t error = cudaMemcpyAsync(to, from, size, kind, NULL);
  if (!error) drain(stream_of(NULL));
  return error ? error : sticky();
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t where) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, where);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t where) {
  CHECK_CONTEXT;
  enqueue_transfer(where, set, (transfer){to, NULL, size, value});
  return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }

// --- devices -----------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 0;
  CHECK_CONTEXT;
  *count = device_count;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  CHECK_CONTEXT;
  if (device < 0 || device >= device_count) return failed(cudaErrorInvalidDevice);
  current_device = device;
  make_context();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  CHECK_CONTEXT;
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDA_VERSION_KNOWN;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
  CHECK_CONTEXT;
  snprintf(text, length, "0000:%02x:00.0", FIRST_BUS + physical[device]);
  return cudaSuccess;
}

// The figures of an H100, as far as torch looks at them when it is asked for a device's properties or plans a launch.
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  CHECK_CONTEXT;
  if (device < 0 || device >= device_count) return failed(cudaErrorInvalidDevice);
  *properties = (struct cudaDeviceProp){
      .name = "Simulated GPU",
      .totalGlobalMem = gpu_memory(),
      .major = 9,
      .minor = 0,
      .multiProcessorCount = 132,
      .warpSize = 32,
      .maxThreadsPerBlock = 1024,
      .maxThreadsPerMultiProcessor = 2048,
      .maxBlocksPerMultiProcessor = 32,
      .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {2147483647, 65535, 65535},
      .regsPerBlock = 65536,
      .regsPerMultiprocessor = 65536,
      .sharedMemPerBlock = 49152,
      .sharedMemPerBlockOptin = 232448,
      .sharedMemPerMultiprocessor = 233472,
      .l2CacheSize = 50 << 20,
      .memoryBusWidth = 5120,
      .textureAlignment = 512,
      .pciBusID = FIRST_BUS + physical[device],
  };
  properties->uuid.bytes[3] = (char)physical[device];    // UUID_FORMAT, in bytes
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  CHECK_CONTEXT;
  switch ((int)attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  CHECK_CONTEXT;
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }

// torch looks up functions of the driver by name (c10/cuda/driver_api.cpp); none of them works here.
static int not_supported(void) { return cudaErrorNotSupported; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  *function = (void *)not_supported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- kernels -----------------------------------------------------------------------------------------------------------

enum { MAX_KERNELS = 200000 };    // libtorch_cuda registers some 60,000 when it is loaded

static struct {
  const void *host;
  const char *name;
} kernels[MAX_KERNELS];
static int kernel_count;

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[1];
  return handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {}

void __cudaUnregisterFatBinary(void **handle) {}

char __cudaInitModule(void **handle) { return 1; }

void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external, size_t size,
                       int constant, int global) {}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                            void *bid, void *block_dimensions, void *grid_dimensions, int *warp) {
  if (kernel_count < MAX_KERNELS) {
    kernels[kernel_count].host = host;
    kernels[kernel_count++].name = name;
  }
}

static const char *name_of(const void *host) {
  for (int i = 0; i < kernel_count; i++)
    if (kernels[i].host == host) return kernels[i].name;
  return "";
}

// `kernel<<<grid, block>>>(...)`: nvcc pushes the configuration, and the host's function of the kernel pops it.
static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *where;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *where) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.where = where;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *where) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void **)where = configuration.where;
  return cudaSuccess;
}

typedef struct {
  char *to;
  long count;
  int width;
  char value[8];
} filling;

static void fill(void *argument) {
  filling *it = argument;
  for (long i = 0; i < it->count; i++) memcpy(it->to + i * it->width, it->value, it->width);
  free(it);
}

static void sleep_on_device(void *nanoseconds) {
  long all = (long)nanoseconds;
  struct timespec time = {all / 1000000000, all % 1000000000};
  nanosleep(&time, NULL);
}

// Return the width of the elements, by the mangled type that follows FillFunctorI; 0: not one that is filled here.
static int element_width(const char *type) {
  if (strstr(type, "Half") || strstr(type, "BFloat16")) return 2;
  switch (*type) {
    case 'f': case 'i': case 'j': return 4;
    case 'd': case 'l': case 'm': return 8;
    case 'b': case 'h': case 'a': return 1;
    case 's': case 't': return 2;
    default: return 0;
  }
}

// torch.cuda._sleep(cycles) launches spin_kernel: a cycle is a nanosecond here. Fills that torch's C++ code does below
// the dispatcher (vectorized_elementwise_kernel<FillFunctor<T>>(count, functor, pointers)) are done; the rest is not.
static cudaError_t launch(const void *host, void **arguments, cudaStream_t where) {
  static const char FILL[] = "FillFunctorI";
  CHECK_CONTEXT;
  const char *name = name_of(host), *functor = strstr(name, FILL);
  if (strstr(name, "spin_kernel")) {
    enqueue(where, sleep_on_device, (void *)*(long *)arguments[0]);
  } else if (functor && strstr(name, "vectorized_elementwise_kernel")) {
    int width = element_width(functor + strlen(FILL));
    if (width) {
      filling *made = malloc(sizeof *made);
      *made = (filling){.to = *(char **)arguments[2], .count = *(int *)arguments[0], .width = width};
      memcpy(made->value, arguments[1], width);
      enqueue(where, fill, made);
    }
  }
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t where) {
  return launch(host, arguments, where);
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
  *kernel = (cudaKernel_t)host;
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t where) {
  return launch(kernel, arguments, where);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments) {
  return launch(host, arguments, config->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t where) {
  return launch(host, arguments, where);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *host) {
  *attributes = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .binaryVersion = 90, .ptxVersion = 90};
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *host, int block, size_t shared) {
  *count = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *host, int block,
                                                                   size_t shared, unsigned flags) {
  *count = 2;
  return cudaSuccess;
}
