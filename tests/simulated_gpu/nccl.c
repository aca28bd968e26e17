// A stand-in for libnccl.so.2: collectives between processes of one machine, through files in FAKE_DIR. What it keeps of
// NCCL, because ProcessGroupNCCL and nblaunch depend on it:
//
// * a call returns at once; the stream, not the caller, waits for the peers, for ever, and only an abort ends that;
// * collectives of a communicator are matched by their order, whatever they are: a rank that has posted one more than its
//   peers gets the number of a later one;
// * forming and splitting a communicator are collectives themselves, which block the caller;
// * no two ranks on one GPU, unless NCCL_MULTI_RANK_GPU_ENABLE is set (NCCL 2.30).
//
// Each of N ranks writes what it gives to DIRECTORY/NUMBER.RANK and reads what the others wrote.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <nccl.h>

#include "machine.h"

enum { MAX_RANKS = 64, NAME = 80, MULTI_RANK_SINCE = 23000 };

struct ncclComm {
  char directory[400];
  int size, rank, gpu, blocking;
  volatile int aborted;
  volatile int pending;    // posted, and still in a stream
  long posted, sent[MAX_RANKS], received[MAX_RANKS];
  int splits;
};

static char last_error[500];

int fakecuda_physical(int device);    // cudart.c

// --- messages ----------------------------------------------------------------------------------------------------------

static void nap(void) {
  struct timespec time = {0, 300000};
  nanosleep(&time, NULL);
}

// Write a message: whoever finds it finds all of it.
static void publish(struct ncclComm *comm, const char *name, const void *data, size_t size) {
  char made[PATH_SIZE], path[PATH_SIZE];
  snprintf(made, sizeof made, "%s/%s.tmp%d", comm->directory, name, comm->rank);
  snprintf(path, sizeof path, "%s/%s", comm->directory, name);
  FILE *stream = fopen(made, "w");
  if (!stream) return;
  fwrite(data, 1, size, stream);
  fclose(stream);
  rename(made, path);
}

// Wait for a message and read as much of it as there is, at most `size`; return whether the communicator was not aborted.
static int fetch(struct ncclComm *comm, const char *name, void *data, size_t size) {
  char path[PATH_SIZE];
  FILE *stream;
  snprintf(path, sizeof path, "%s/%s", comm->directory, name);
  while (!(stream = fopen(path, "r"))) {
    if (comm->aborted) return 0;
    nap();
  }
  // A peer whose collective is a smaller one leaves the rest as it is; NCCL would hang, or write past the end.
  size_t got = fread(data, 1, size, stream);
  (void)got;
  fclose(stream);
  return 1;
}

static void forget(struct ncclComm *comm, const char *name) {
  char path[PATH_SIZE];
  snprintf(path, sizeof path, "%s/%s", comm->directory, name);
  unlink(path);
}

// --- communicators -----------------------------------------------------------------------------------------------------

// Wait for all ranks, and refuse two on one GPU with NCCL's own words (src/init.cc).
static ncclResult_t meet(struct ncclComm *comm) {
  char name[NAME];
  int device = 0, gpus[MAX_RANKS];
  cudaGetDevice(&device);
  comm->gpu = fakecuda_physical(device);
  mkdir(comm->directory, 0700);
  snprintf(name, sizeof name, "hello.%d", comm->rank);
  publish(comm, name, &comm->gpu, sizeof comm->gpu);
  for (int i = 0; i < comm->size; i++) {
    snprintf(name, sizeof name, "hello.%d", i);
    if (!fetch(comm, name, &gpus[i], sizeof gpus[i])) return ncclSystemError;
  }
  if (NCCL_VERSION_CODE >= MULTI_RANK_SINCE && getenv("NCCL_MULTI_RANK_GPU_ENABLE")) return ncclSuccess;
  for (int i = 0; i < comm->size; i++)
    for (int j = 0; j < i; j++)
      if (gpus[i] == gpus[j]) {
        snprintf(last_error, sizeof last_error,
                 "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000", j, i, FIRST_BUS + gpus[i]);
        return ncclInvalidUsage;
      }
  return ncclSuccess;
}

static struct ncclComm *create(int size, int rank) {
  struct ncclComm *made = calloc(1, sizeof *made);
  made->size = size;
  made->rank = rank;
  made->blocking = 1;
  return made;
}

ncclResult_t ncclGetVersion(int *version) {
  *version = NCCL_VERSION_CODE;    // that of the torch it is built for
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  unsigned long random[2] = {0};
  memset(id, 0, sizeof *id);
  int file = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  if (read(file, random, sizeof random) != sizeof random) return ncclSystemError;
  close(file);
  snprintf(id->internal, 100, "%lx%lx", random[0], random[1]);
  return ncclSuccess;
}

// The real one opens sockets, detects the topology and takes 0.3 to 6 s and 0.3 to 1 GB of each GPU.
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
  if (size > MAX_RANKS) return ncclInvalidArgument;
  *comm = create(size, rank);
  snprintf((*comm)->directory, sizeof(*comm)->directory, "%.200s/nccl-%.100s", state_directory(), id.internal);
  return meet(*comm);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  ncclResult_t result = ncclCommInitRank(comm, size, id, rank);
  if (result == ncclSuccess && config && config->blocking == 0) (*comm)->blocking = 0;
  return result;
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int count, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
  return ncclCommInitRank(comm, size, ids[0], rank);
}

// A collective of the parent, of all its ranks: one that does not call it is waited for, for ever. ProcessGroupNCCL
// splits where the default group was formed with device_id= (NCCL's own rule: ncclCommSplit in its documentation).
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config) {
  int number = comm->splits++, mine[2] = {color, key}, theirs[2], size = 0, rank = 0;
  char name[NAME];
  snprintf(name, sizeof name, "split%d.%d", number, comm->rank);
  publish(comm, name, mine, sizeof mine);
  for (int i = 0; i < comm->size; i++) {
    snprintf(name, sizeof name, "split%d.%d", number, i);
    if (!fetch(comm, name, theirs, sizeof theirs)) return ncclSystemError;
    if (theirs[0] != color) continue;
    size++;
    if (theirs[1] < key || (theirs[1] == key && i < comm->rank)) rank++;
  }
  *made = NULL;
  if (color < 0) return ncclSuccess;    // NCCL_SPLIT_NOCOLOR: takes part in the split, and is in no group
  *made = create(size, rank);
  snprintf((*made)->directory, sizeof(*made)->directory, "%.300s/s%d-%d", comm->directory, number, color);
  return meet(*made);
}

// Frees the streams of what they wait for, and returns when nothing of the communicator is under way any more. The real
// one has been seen to take seconds with 8 GPUs; FAKE_NCCL_ABORT_MS stands for that.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  comm->aborted = 1;
  while (comm->pending) nap();
  const char *milliseconds = getenv("FAKE_NCCL_ABORT_MS");
  if (milliseconds) usleep(atoi(milliseconds) * 1000);
  return ncclSuccess;
}

#ifdef NCCL_REVOKE_DEFAULT
// Ends what is under way as an abort does, and frees nothing: ProcessGroupNCCL2 aborts it afterwards. nccl.h allows splits
// and shrinks of a revoked communicator, which are not here.
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  if (flags != NCCL_REVOKE_DEFAULT) return ncclInvalidArgument;
  ncclResult_t result = ncclCommAbort(comm);
  // Seen with NCCL 2.30.7: a communicator that does not block is asked later whether it has been revoked.
  return comm->blocking ? result : ncclInProgress;
}
#endif

// Not freed: the watchdog of ProcessGroupNCCL may still ask.
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclSuccess; }

ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }

// There are no asynchronous errors: a peer that died is waited for, as by a real GPU whose peer is on the same machine.
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "simulated error";
  }
}

const char *ncclGetLastError(ncclComm_t comm) { return last_error; }

ncclResult_t ncclCommCount(ncclComm_t comm, int *count) {
  *count = comm->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device) { return cudaGetDevice(device) ? ncclUnhandledCudaError : ncclSuccess; }

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t size, void **handle) {
  *handle = NULL;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) { return ncclSuccess; }

// Nothing to group: a send never waits for its receiver.
ncclResult_t ncclGroupStart(void) { return ncclSuccess; }

ncclResult_t ncclGroupEnd(void) { return ncclSuccess; }

// --- numbers -----------------------------------------------------------------------------------------------------------

static int width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}

static float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float from_bfloat16(uint16_t half) { return from_bits((uint32_t)half << 16); }

static uint16_t to_bfloat16(float value) {
  uint32_t bits = to_bits(value);
  if (value != value) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);    // to nearest, ties to even
}

static float from_float16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | fraction << 13);
  if (exponent) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  float value = (float)fraction / 16777216.0f;    // subnormal: 2 ** -24 each
  return sign ? -value : value;
}

static uint16_t to_float16(float value) {
  uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7e00;
  if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);    // from 65520 on: infinity
  if (magnitude < 0x38800000) {                                      // subnormal; adding 0.5 rounds to 2 ** -24
    return (uint16_t)(sign | (to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f)));
  }
  return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

#define COMBINED(a, b)                                                                                                 \
  (op == ncclMax ? ((a) > (b) ? (a) : (b)) : op == ncclMin ? ((a) < (b) ? (a) : (b)) : op == ncclProd ? (a) * (b) : (a) + (b))
#define REDUCE_AS(type)                                                                                                \
  {                                                                                                                    \
    type *into = sum;                                                                                                  \
    const type *other = added;                                                                                         \
    for (size_t i = 0; i < count; i++) into[i] = COMBINED(into[i], other[i]);                                          \
  }
#define REDUCE_HALVES(from, to)                                                                                        \
  {                                                                                                                    \
    uint16_t *into = sum;                                                                                              \
    const uint16_t *other = added;                                                                                     \
    for (size_t i = 0; i < count; i++) {                                                                               \
      float a = from(into[i]), b = from(other[i]);                                                                     \
      into[i] = to(COMBINED(a, b));                                                                                    \
    }                                                                                                                  \
  }

static void reduce(void *sum, const void *added, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclFloat32: REDUCE_AS(float) break;
    case ncclFloat64: REDUCE_AS(double) break;
    case ncclFloat16: REDUCE_HALVES(from_float16, to_float16) break;
    case ncclBfloat16: REDUCE_HALVES(from_bfloat16, to_bfloat16) break;
    case ncclInt64: REDUCE_AS(int64_t) break;
    case ncclUint64: REDUCE_AS(uint64_t) break;
    case ncclInt32: REDUCE_AS(int32_t) break;
    case ncclUint32: REDUCE_AS(uint32_t) break;
    case ncclInt8: REDUCE_AS(int8_t) break;
    case ncclUint8: REDUCE_AS(uint8_t) break;
    default: break;    // refused by can_reduce
  }
}

static int can_reduce(ncclDataType_t type) { return type != ncclFloat8e4m3 && type != ncclFloat8e5m2; }

#define DIVIDE_AS(type, from, to)                                                                                      \
  for (size_t i = 0; i < count; i++) ((type *)sum)[i] = to(from(((type *)sum)[i]) / size);

static void divide(void *sum, size_t count, ncclDataType_t type, int size) {
  switch (type) {
    case ncclFloat32: DIVIDE_AS(float, , ) break;
    case ncclFloat64: DIVIDE_AS(double, , ) break;
    case ncclFloat16: DIVIDE_AS(uint16_t, from_float16, to_float16) break;
    case ncclBfloat16: DIVIDE_AS(uint16_t, from_bfloat16, to_bfloat16) break;
    case ncclInt64: DIVIDE_AS(int64_t, , ) break;
    case ncclInt32: DIVIDE_AS(int32_t, , ) break;
    default: break;
  }
}

// --- collectives -------------------------------------------------------------------------------------------------------

typedef enum { REDUCE, GATHER, SCATTER, BROADCAST, SEND, RECEIVE, ALL_TO_ALL } kind;

typedef struct {
  struct ncclComm *comm;
  kind what;
  int peer;    // root, or the other side; -1: all
  const char *from;
  char *to;
  size_t count;    // of elements that this rank gives, or gets of a scatter
  ncclDataType_t type;
  ncclRedOp_t op;
  long number;
} job;

static void exchange(job *it) {
  struct ncclComm *comm = it->comm;
  char name[NAME];
  size_t part = it->count * width(it->type);
  size_t whole = it->what == SCATTER || it->what == ALL_TO_ALL ? part * comm->size : part;
  char *theirs = malloc(whole + 1), *sum = malloc(whole + 1);
  snprintf(name, sizeof name, "%ld.%d", it->number, comm->rank);
  publish(comm, name, it->from, whole);
  for (int i = 0; i < comm->size; i++) {
    snprintf(name, sizeof name, "%ld.%d", it->number, i);
    if (!fetch(comm, name, theirs, whole)) goto aborted;
    if (it->what == GATHER) memcpy(it->to + i * part, theirs, part);
    if (it->what == BROADCAST && i == it->peer) memcpy(it->to, theirs, part);
    if (it->what == ALL_TO_ALL) memcpy(it->to + i * part, theirs + comm->rank * part, part);
    if (it->what != REDUCE && it->what != SCATTER) continue;
    if (i)
      reduce(sum, theirs, whole / width(it->type), it->type, it->op);
    else
      memcpy(sum, theirs, whole);
  }
  if (it->op == ncclAvg) divide(sum, whole / width(it->type), it->type, comm->size);
  if (it->what == SCATTER) memcpy(it->to, sum + comm->rank * part, part);
  if (it->what == REDUCE && (it->peer < 0 || it->peer == comm->rank)) memcpy(it->to, sum, part);
  // Who has read the messages with this number has done with those of the one before it: they can go.
  snprintf(name, sizeof name, "%ld.%d", it->number - 2, comm->rank);
  forget(comm, name);
aborted:
  free(theirs);
  free(sum);
}

// What the stream does.
static void work(void *argument) {
  job *it = argument;
  struct ncclComm *comm = it->comm;
  char name[NAME];
  size_t size = it->count * width(it->type);
  if (!comm->aborted) {
    switch (it->what) {
      case SEND:
        snprintf(name, sizeof name, "p%d-%d.%ld", comm->rank, it->peer, it->number);
        publish(comm, name, it->from, size);
        break;
      case RECEIVE:
        snprintf(name, sizeof name, "p%d-%d.%ld", it->peer, comm->rank, it->number);
        if (fetch(comm, name, it->to, size)) forget(comm, name);
        break;
      default: exchange(it);
    }
  }
  __sync_fetch_and_sub(&comm->pending, 1);
  free(it);
}

static ncclResult_t post(job what, cudaStream_t where) {
  struct ncclComm *comm = what.comm;
  if (comm->aborted) return ncclInvalidUsage;
  if ((what.what == REDUCE || what.what == SCATTER) && !can_reduce(what.type)) return ncclInvalidArgument;
  job *made = malloc(sizeof *made);
  *made = what;
  made->number = what.what == SEND      ? comm->sent[what.peer]++
                 : what.what == RECEIVE ? comm->received[what.peer]++
                                        : comm->posted++;
  __sync_fetch_and_add(&comm->pending, 1);
  if (!cudaLaunchHostFunc(where, work, made)) return ncclSuccess;
  __sync_fetch_and_sub(&comm->pending, 1);
  free(made);
  return ncclUnhandledCudaError;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t where) {
  return post((job){comm, REDUCE, -1, from, to, count, type, op, 0}, where);
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t where) {
  return post((job){comm, REDUCE, root, from, to, count, type, op, 0}, where);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t where) {
  return post((job){comm, GATHER, -1, from, to, count, type, ncclSum, 0}, where);
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t where) {
  return post((job){comm, SCATTER, -1, from, to, count, type, op, 0}, where);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t where) {
  return post((job){comm, BROADCAST, root, from, to, count, type, ncclSum, 0}, where);
}

ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t where) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, where);
}

ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t where) {
  return post((job){comm, ALL_TO_ALL, -1, from, to, count, type, ncclSum, 0}, where);
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t where) {
  return post((job){comm, SEND, peer, from, NULL, count, type, ncclSum, 0}, where);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t where) {
  return post((job){comm, RECEIVE, peer, NULL, to, count, type, ncclSum, 0}, where);
}
