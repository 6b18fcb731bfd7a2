// A wall clock that is wrong, for a host that has the kernel's like all others: time namespaces shift only the clocks
// that count from boot. Loaded by LD_PRELOAD, it adds $WALL_CLOCK_AHEAD_S to what Python reads. What C++ reads, in Ray
// and torch, and what the kernel writes, such as times of files, stays right: absolute deadlines that a library hands to
// the kernel would mean another time there.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <time.h>

static int (*real)(clockid_t, struct timespec *);
static long ahead_s;
static void *python;  // the program itself, where it is a Python without a libpython

__attribute__((constructor)) static void begin(void) {
  const char *seconds = getenv("WALL_CLOCK_AHEAD_S"), *program = (const char *)getauxval(AT_EXECFN);
  Dl_info info;
  ahead_s = seconds ? atol(seconds) : 0;
  real = dlsym(RTLD_NEXT, "clock_gettime");
  if (program && strstr(program, "python") && dladdr((void *)getauxval(AT_ENTRY), &info)) python = info.dli_fbase;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  if (!real) begin();  // another library's constructor comes first
  int result = real(clock, time);
  Dl_info caller;
  if (clock != CLOCK_REALTIME || result || !ahead_s || !dladdr(__builtin_return_address(0), &caller)) return result;
  if (caller.dli_fbase == python || strstr(caller.dli_fname, "libpython")) time->tv_sec += ahead_s;
  return result;
}
