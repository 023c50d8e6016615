/* A library for LD_PRELOAD under which one file operation fails.

   `fault_begin` names a folder and the number of the operation, counted from 1 over this process and those that it forks, that fails
   below this folder: with an errno, or, for a write, after half of the bytes. Which operations count depends on the errno: those that
   a real file system fails with it. Until `fault_begin`, and after the fault, everything passes. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ALLOCATES = 1, NAMES = 2, READS = 4, HANDLE = 8 };

static char folder[PATH_MAX];
static size_t folder_length;
static int fault_errno, half;
static long fail_at;
static _Atomic long *count;
static void (*tell)(long, const char *, const char *);
static __thread int inside;

/* Counts operations below `below` from now on; `number` 0 only counts. `error` 0 halves writes. `on_operation` is called with number,
   function and path of the operation that fails, or, where `number` is 0, of every one. */
void fault_begin(const char *below, long number, int error, void (*on_operation)(long, const char *, const char *)) {
  if (!count) count = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  snprintf(folder, sizeof folder, "%s", below);
  folder_length = strlen(folder);
  fault_errno = error;
  half = error == 0;
  fail_at = number;
  tell = on_operation;
  *count = 0;
}

void fault_end(void) { folder_length = 0; }

long fault_count(void) { return count ? *count : 0; }

static int is_below(const char *path) {
  return !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || path[folder_length] == 0);
}

static const char *path_of(int handle, char *buffer) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
  ssize_t length = readlink(link, buffer, PATH_MAX - 1);
  buffer[length > 0 ? length : 0] = 0;
  return buffer;
}

static const char *absolute(int at, const char *path, char *buffer) {
  char base[PATH_MAX];
  if (path[0] == '/') return path;
  if (at == AT_FDCWD) {
    if (!getcwd(base, sizeof base)) return path;
  } else {
    path_of(at, base);
  }
  return snprintf(buffer, PATH_MAX, "%s/%s", base, path) < PATH_MAX ? buffer : path;
}

/* Whether file systems fail an operation of this kind with the errno of this case. */
static int counts(int kind) {
  if (half) return kind & HANDLE && kind & ALLOCATES;
  switch (fault_errno) {
    case ENOSPC:
    case EDQUOT:
      return kind & ALLOCATES;
    case EACCES:
      return kind & NAMES;
    default:
      return 1;
  }
}

/* 1 if the operation must fail; errno is set. */
static int fails(const char *name, int kind, const char *path) {
  if (!folder_length || inside || !counts(kind) || !path || !is_below(path)) return 0;
  long number = ++*count;
  int hit = number == fail_at;
  if (tell && (hit || !fail_at)) {
    int before = errno;
    inside = 1;
    tell(number, name, path);
    inside = 0;
    errno = before;
  }
  if (hit) errno = half ? 0 : fault_errno;
  return hit;
}

static int fails_at(const char *name, int kind, int at, const char *path) {
  char buffer[PATH_MAX];
  return folder_length && !inside && path && fails(name, kind, absolute(at, path, buffer));
}

static int handle_fails(const char *name, int kind, int handle) {
  char buffer[PATH_MAX];
  return folder_length && !inside && fails(name, kind | HANDLE, path_of(handle, buffer));
}

#define REAL(result, name, parameters)                         \
  static result(*real) parameters;                             \
  if (!real) real = (result(*) parameters)dlsym(RTLD_NEXT, #name)

static int open_kind(int flags) {
  return NAMES | ((flags & (O_CREAT | O_TRUNC)) ? ALLOCATES : 0) | ((flags & O_ACCMODE) == O_RDONLY ? READS : 0);
}

#define MODE(flags)                                    \
  mode_t mode = 0;                                     \
  if ((flags) & (O_CREAT | __O_TMPFILE)) {             \
    va_list rest;                                      \
    va_start(rest, flags);                             \
    mode = va_arg(rest, mode_t);                       \
    va_end(rest);                                      \
  }

#define OPEN(name)                                                                 \
  int name(const char *path, int flags, ...) {                                     \
    REAL(int, name, (const char *, int, ...));                                     \
    MODE(flags)                                                                    \
    if (fails_at("open", open_kind(flags), AT_FDCWD, path)) return -1;             \
    return real(path, flags, mode);                                                \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                               \
  int name(int at, const char *path, int flags, ...) {                             \
    REAL(int, name, (int, const char *, int, ...));                                \
    MODE(flags)                                                                    \
    if (fails_at("open", open_kind(flags), at, path)) return -1;                   \
    return real(at, path, flags, mode);                                            \
  }
OPENAT(openat)
OPENAT(openat64)

#define CREAT(name)                                                                \
  int name(const char *path, mode_t mode) {                                        \
    REAL(int, name, (const char *, mode_t));                                       \
    if (fails_at("open", open_kind(O_CREAT | O_WRONLY), AT_FDCWD, path)) return -1; \
    return real(path, mode);                                                       \
  }
CREAT(creat)
CREAT(creat64)

#define FOPEN(name)                                                                \
  FILE *name(const char *path, const char *mode) {                                 \
    REAL(FILE *, name, (const char *, const char *));                              \
    int flags = mode[0] == 'r' ? O_RDONLY : O_CREAT | O_WRONLY;                    \
    if (fails_at("fopen", open_kind(flags), AT_FDCWD, path)) return NULL;          \
    return real(path, mode);                                                       \
  }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int handle, const void *bytes, size_t size) {
  REAL(ssize_t, write, (int, const void *, size_t));
  if (handle_fails("write", ALLOCATES, handle)) return half ? real(handle, bytes, (size + 1) / 2) : -1;
  return real(handle, bytes, size);
}

#define PWRITE(name, type)                                                                           \
  ssize_t name(int handle, const void *bytes, size_t size, type place) {                             \
    REAL(ssize_t, name, (int, const void *, size_t, type));                                          \
    if (handle_fails("write", ALLOCATES, handle)) return half ? real(handle, bytes, (size + 1) / 2, place) : -1; \
    return real(handle, bytes, size, place);                                                         \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int handle, const struct iovec *parts, int size) {
  REAL(ssize_t, writev, (int, const struct iovec *, int));
  if (handle_fails("write", ALLOCATES, handle)) return half ? real(handle, parts, (size + 1) / 2) : -1;
  return real(handle, parts, size);
}

ssize_t read(int handle, void *bytes, size_t size) {
  REAL(ssize_t, read, (int, void *, size_t));
  if (!half && handle_fails("read", READS, handle)) return -1;
  return real(handle, bytes, size);
}

#define PREAD(name, type)                                               \
  ssize_t name(int handle, void *bytes, size_t size, type place) {      \
    REAL(ssize_t, name, (int, void *, size_t, type));                   \
    if (!half && handle_fails("read", READS, handle)) return -1;        \
    return real(handle, bytes, size, place);                            \
  }
PREAD(pread, off_t)
PREAD(pread64, off64_t)

#define SENDFILE(name, type)                                            \
  ssize_t name(int to, int from, type *place, size_t size) {            \
    REAL(ssize_t, name, (int, int, type *, size_t));                    \
    if (handle_fails("sendfile", ALLOCATES, to)) {                      \
      if (half) size = (size + 1) / 2;                                  \
      else return -1;                                                   \
    }                                                                   \
    return real(to, from, place, size);                                 \
  }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

#define SYNC(name)                                                  \
  int name(int handle) {                                            \
    REAL(int, name, (int));                                         \
    if (!half && handle_fails(#name, ALLOCATES, handle)) return -1; \
    return real(handle);                                            \
  }
SYNC(fsync)
SYNC(fdatasync)

/* Only what was written can fail here; the handle is closed nevertheless, as on Linux. */
int close(int handle) {
  REAL(int, close, (int));
  int written = folder_length && !half && (fcntl(handle, F_GETFL) & O_ACCMODE) != O_RDONLY;
  int failed = written && handle_fails("close", ALLOCATES, handle);
  int before = errno, result = real(handle);
  if (failed) errno = before;
  return failed ? -1 : result;
}

#define ON_PATH(name, kind, parameters, arguments)                          \
  int name parameters {                                                     \
    REAL(int, name, parameters);                                            \
    if (fails_at(#name, kind, AT_FDCWD, path)) return -1;                   \
    return real arguments;                                                  \
  }
ON_PATH(mkdir, NAMES | ALLOCATES, (const char *path, mode_t mode), (path, mode))
ON_PATH(unlink, NAMES, (const char *path), (path))
ON_PATH(rmdir, NAMES, (const char *path), (path))
ON_PATH(truncate, NAMES | ALLOCATES, (const char *path, off_t size), (path, size))
ON_PATH(truncate64, NAMES | ALLOCATES, (const char *path, off64_t size), (path, size))
ON_PATH(chmod, NAMES, (const char *path, mode_t mode), (path, mode))
ON_PATH(access, NAMES | READS, (const char *path, int mode), (path, mode))
ON_PATH(stat, NAMES | READS, (const char *path, struct stat *found), (path, found))
ON_PATH(stat64, NAMES | READS, (const char *path, struct stat64 *found), (path, found))
ON_PATH(lstat, NAMES | READS, (const char *path, struct stat *found), (path, found))
ON_PATH(lstat64, NAMES | READS, (const char *path, struct stat64 *found), (path, found))
ON_PATH(symlink, NAMES | ALLOCATES, (const char *target, const char *path), (target, path))

#define ON_PATH_AT(name, kind, parameters, arguments)                       \
  int name parameters {                                                     \
    REAL(int, name, parameters);                                            \
    if (fails_at(#name, kind, at, path)) return -1;                         \
    return real arguments;                                                  \
  }
ON_PATH_AT(mkdirat, NAMES | ALLOCATES, (int at, const char *path, mode_t mode), (at, path, mode))
ON_PATH_AT(unlinkat, NAMES, (int at, const char *path, int flags), (at, path, flags))
ON_PATH_AT(utimensat, NAMES, (int at, const char *path, const struct timespec times[2], int flags), (at, path, times, flags))
ON_PATH_AT(fstatat, NAMES | READS, (int at, const char *path, struct stat *found, int flags), (at, path, found, flags))
ON_PATH_AT(fstatat64, NAMES | READS, (int at, const char *path, struct stat64 *found, int flags), (at, path, found, flags))
ON_PATH_AT(statx, NAMES | READS, (int at, const char *path, int flags, unsigned mask, struct statx *found),
           (at, path, flags, mask, found))

/* The target of a rename is where it fails. */
int rename(const char *from, const char *path) {
  REAL(int, rename, (const char *, const char *));
  if (fails_at("rename", NAMES | ALLOCATES, AT_FDCWD, path)) return -1;
  return real(from, path);
}

int renameat(int from_at, const char *from, int at, const char *path) {
  REAL(int, renameat, (int, const char *, int, const char *));
  if (fails_at("rename", NAMES | ALLOCATES, at, path)) return -1;
  return real(from_at, from, at, path);
}

#define TRUNCATE(name, type)                                        \
  int name(int handle, type size) {                                 \
    REAL(int, name, (int, type));                                   \
    if (!half && handle_fails("ftruncate", ALLOCATES, handle)) return -1; \
    return real(handle, size);                                      \
  }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

DIR *opendir(const char *path) {
  REAL(DIR *, opendir, (const char *));
  if (fails_at("opendir", NAMES | READS, AT_FDCWD, path)) return NULL;
  return real(path);
}

#define READDIR(name, type)                                                \
  struct type *name(DIR *listing) {                                        \
    REAL(struct type *, name, (DIR *));                                    \
    if (!half && handle_fails("readdir", READS, dirfd(listing))) return NULL; \
    return real(listing);                                                  \
  }
READDIR(readdir, dirent)
READDIR(readdir64, dirent64)
