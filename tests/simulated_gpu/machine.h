// What all stand-ins know of the simulated machine: how many GPUs it has, and which process holds how much of their
// memory. Processes share this through files in FAKE_DIR: `mem.PID` has a line "GPU BYTES" for each context that the
// process has, and `log` a line for each process that initialised CUDA, with the environment it did that in.
#ifndef MACHINE_H
#define MACHINE_H

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 16
#define MAX_HOLDERS 256
#define UUID_FORMAT "GPU-%08x-0000-0000-0000-000000000000"
#define PATH_SIZE 512
#define FIRST_BUS 0x10    // GPU n is at the PCI bus address FIRST_BUS + n
#define CUDA_VERSION_KNOWN 13000

static const size_t CONTEXT_BYTES = (size_t)300 << 20;    // what a context takes on the card; H100: 300 to 500 MiB
static const size_t DEFAULT_MEMORY = (size_t)4 << 30;

static inline const char *state_directory(void) {
  const char *directory = getenv("FAKE_DIR");
  return directory ? directory : "/tmp";
}

static inline int installed_gpus(void) {
  const char *number = getenv("FAKE_GPUS");
  int count = number ? atoi(number) : 0;
  return count < 0 ? 0 : count > MAX_GPUS ? MAX_GPUS : count;
}

// The memory of each GPU, in bytes.
static inline size_t gpu_memory(void) {
  const char *number = getenv("FAKE_GPU_MEMORY");
  return number ? strtoull(number, NULL, 10) : DEFAULT_MEMORY;
}

static inline void log_event(const char *what) {
  char path[PATH_SIZE];
  const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *rank = getenv("RANK");
  snprintf(path, sizeof path, "%s/log", state_directory());
  FILE *log = fopen(path, "a");
  if (!log) return;
  fprintf(log, "%d %d %s CVD=%s RANK=%s\n", getpid(), getppid(), what, visible ? visible : "(unset)",
          rank ? rank : "-");
  fclose(log);
}

// Return the index of the GPU with this UUID, or whose UUID alone begins so, as CUDA_VISIBLE_DEVICES allows; else -1.
static inline int gpu_by_uuid(const char *prefix) {
  int found = -1;
  for (int gpu = 0; gpu < installed_gpus(); gpu++) {
    char uuid[64];
    snprintf(uuid, sizeof uuid, UUID_FORMAT, gpu);
    if (strncmp(uuid, prefix, strlen(prefix))) continue;
    if (found >= 0) return -1;
    found = gpu;
  }
  return found;
}

// Return whether the process that wrote a file still holds what it says there. A process that was killed has not
// taken its file away, is perhaps not waited for yet (a zombie), and its number may be another process's by now.
static inline int still_holds(int pid, const struct stat *file) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE *stream = fopen(path, "r");
  if (!stream) return 0;
  size_t length = fread(text, 1, sizeof text - 1, stream);
  fclose(stream);
  text[length] = 0;
  char *rest = strrchr(text, ')'), state;    // the name of the program may contain anything
  unsigned long long started;
  if (!rest || sscanf(rest + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                      &state, &started) != 2)
    return 1;
  if (state == 'Z' || state == 'X') return 0;
  struct timespec boot, now;
  clock_gettime(CLOCK_BOOTTIME, &boot);
  clock_gettime(CLOCK_REALTIME, &now);
  double process_age = boot.tv_sec + boot.tv_nsec / 1e9 - started / (double)sysconf(_SC_CLK_TCK);
  double file_age = now.tv_sec - file->st_mtim.tv_sec + (now.tv_nsec - file->st_mtim.tv_nsec) / 1e9;
  return file_age <= process_age + 0.1;
}

typedef struct {
  int pid;
  unsigned long long bytes;
} holder;

// Fill in which processes hold memory of a GPU, and return how many there are.
static inline int holders_of(int gpu, holder *found) {
  int count = 0;
  DIR *directory = opendir(state_directory());
  if (!directory) return 0;
  struct dirent *entry;
  while ((entry = readdir(directory)) && count < MAX_HOLDERS) {
    int pid, index;
    size_t bytes;
    char path[PATH_SIZE + 300];
    struct stat file;
    if (sscanf(entry->d_name, "mem.%d", &pid) != 1) continue;
    snprintf(path, sizeof path, "%s/%s", state_directory(), entry->d_name);
    if (stat(path, &file) || !still_holds(pid, &file)) continue;
    FILE *stream = fopen(path, "r");
    if (!stream) continue;
    while (fscanf(stream, "%d %zu", &index, &bytes) == 2)
      if (index == gpu) found[count++] = (holder){pid, bytes};
    fclose(stream);
  }
  closedir(directory);
  return count;
}

#endif
