// What lets a program that is linked here run with older C libraries (FATTN_OLD_GLIBC, cmake/old_glibc.cmake): each function below stands in
// the place of glibc's own of that name, whose newest version the linker would take, and calls the oldest, or the kernel where there was none.
// The versions are those of glibc's own lists; tools/make_wheel.sh has the result audited.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <glob.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define FIRST "GLIBC_2.2.5"
#define SETNAME_FIRST "GLIBC_2.12"
#elif defined(__aarch64__)
#define FIRST "GLIBC_2.17"
#define SETNAME_FIRST FIRST
#else
#error "FATTN_OLD_GLIBC knows x86_64 and aarch64"
#endif

// name(arguments) calls name@version.
#define OLDEST(result, name, version, parameters, ...)    \
  result oldest_##name parameters;                        \
  __asm__(".symver oldest_" #name "," #name "@" version); \
  result name parameters { return oldest_##name(__VA_ARGS__); }

// 2.34 moved these from libdl and libpthread, which are still named in what is linked.
OLDEST(void*, dlopen, FIRST, (const char* file, int mode), file, mode)
OLDEST(int, dlclose, FIRST, (void* handle), handle)
OLDEST(void*, dlsym, FIRST, (void* restrict handle, const char* restrict name), handle, name)
OLDEST(char*, dlerror, FIRST, (void), )
OLDEST(int, dladdr, FIRST, (const void* address, Dl_info* info), address, info)
OLDEST(int, pthread_create, FIRST,
       (pthread_t* restrict thread, const pthread_attr_t* restrict attributes, void* (*run)(void*), void* restrict argument), thread, attributes, run,
       argument)
OLDEST(int, pthread_join, FIRST, (pthread_t thread, void** result), thread, result)
OLDEST(int, pthread_detach, FIRST, (pthread_t thread), thread)
OLDEST(int, pthread_once, FIRST, (pthread_once_t * once, void (*run)(void)), once, run)
OLDEST(int, pthread_key_create, FIRST, (pthread_key_t * key, void (*destroy)(void*)), key, destroy)
OLDEST(int, pthread_key_delete, FIRST, (pthread_key_t key), key)
OLDEST(void*, pthread_getspecific, FIRST, (pthread_key_t key), key)
OLDEST(int, pthread_setspecific, FIRST, (pthread_key_t key, const void* value), key, value)
OLDEST(int, pthread_rwlock_rdlock, FIRST, (pthread_rwlock_t * lock), lock)
OLDEST(int, pthread_rwlock_wrlock, FIRST, (pthread_rwlock_t * lock), lock)
OLDEST(int, pthread_rwlock_unlock, FIRST, (pthread_rwlock_t * lock), lock)
OLDEST(int, pthread_mutex_trylock, FIRST, (pthread_mutex_t * mutex), mutex)
OLDEST(int, pthread_setname_np, SETNAME_FIRST, (pthread_t thread, const char* name), thread, name)
OLDEST(int, pthread_sigmask, FIRST, (int how, const sigset_t* restrict set, sigset_t* restrict old), how, set, old)

// 2.27 and 2.29: without the error handling of SVID, which is a test of the result.
OLDEST(double, exp, FIRST, (double x), x)
OLDEST(double, exp2, FIRST, (double x), x)
OLDEST(double, log, FIRST, (double x), x)
OLDEST(double, log2, FIRST, (double x), x)
OLDEST(double, pow, FIRST, (double x, double y), x, y)
OLDEST(float, expf, FIRST, (float x), x)
OLDEST(float, exp2f, FIRST, (float x), x)
OLDEST(float, logf, FIRST, (float x), x)
OLDEST(float, powf, FIRST, (float x, float y), x, y)

// 2.27: says more of links that lead nowhere.
OLDEST(int, glob, FIRST, (const char* restrict pattern, int flags, int (*failed)(const char*, int), glob_t* restrict found), pattern, flags, failed,
       found)

// 2.38 reads binary numbers in the mode of C23, for which its headers name other functions.
#define OLDEST_NUMBER(result, name)                                   \
  result oldest_##name(const char* restrict, char** restrict, int);   \
  __asm__(".symver oldest_" #name "," #name "@" FIRST);               \
  result __isoc23_##name(const char* restrict, char** restrict, int); \
  result __isoc23_##name(const char* restrict text, char** restrict end, int base) { return oldest_##name(text, end, base); }
OLDEST_NUMBER(long, strtol)
OLDEST_NUMBER(unsigned long, strtoul)
OLDEST_NUMBER(long long, strtoll)
OLDEST_NUMBER(unsigned long long, strtoull)

// 2.33 has these as functions; before, they were macros of the headers. glibc's struct stat is the kernel's on both processors.
int stat(const char* restrict path, struct stat* restrict found) { return (int)syscall(SYS_newfstatat, AT_FDCWD, path, found, 0); }
int lstat(const char* restrict path, struct stat* restrict found) { return (int)syscall(SYS_newfstatat, AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW); }
int fstat(int file, struct stat* found) { return (int)syscall(SYS_fstat, file, found); }
int fstat64(int file, struct stat64* found) { return (int)syscall(SYS_fstat, file, found); }  // struct stat64 is struct stat, too
int fstatat(int folder, const char* restrict path, struct stat* restrict found, int flags) {
  return (int)syscall(SYS_newfstatat, folder, path, found, flags);
}

// 2.27
int memfd_create(const char* name, unsigned flags) { return (int)syscall(SYS_memfd_create, name, flags); }

// 2.25 and 2.36: std::random_device asks here.
int getentropy(void* bytes, size_t size) { return syscall(SYS_getrandom, bytes, size, 0) == (long)size ? 0 : -1; }
uint32_t arc4random(void);
uint32_t arc4random(void) {
  uint32_t value = 0;
  while (getentropy(&value, sizeof value) != 0) {
  }
  return value;
}

// 2.18. Before, there are no destructors of what is a thread's own: it is lost when the thread ends.
int __cxa_thread_atexit_impl(void (*destroy)(void*), void* object, void* library);
int __cxa_thread_atexit_impl(void (*destroy)(void*), void* object, void* library) {
  int (*real)(void (*)(void*), void*, void*);
  *(void**)&real = dlsym(RTLD_DEFAULT, "__cxa_thread_atexit_impl");
  return real ? real(destroy, object, library) : 0;
}

// 2.32: whether reference counts need atomic operations; yes is right at all times.
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
