// Makes calls on files below $LOCALRT_FAULT_FOLDER misbehave: preloaded by faulty_disk.py, which shares `Control` with it
// in the file $LOCALRT_FAULT_CONTROL.
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {
enum Kind { READ = 1, WRITE = 2, OPEN = 4, CHANGE = 8, SYNC = 16, LOOK = 32 };
enum { SHORT = -1, SLOW = -2 };  // effects that are no error numbers

// Calls number `first` to `last` of these `kinds` have the `effect`; `calls` counts all of them.
struct Control { long calls, first, last, kinds, effect, microseconds; };

Control* control() {
    static void* const shared = [] {
        const long file = syscall(SYS_openat, AT_FDCWD, getenv("LOCALRT_FAULT_CONTROL"), O_RDWR, 0);
        return mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, static_cast<int>(file), 0);
    }();
    return static_cast<Control*>(shared);
}

std::string opened(int file) {
    char path[PATH_MAX];
    const ssize_t size = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path);
    return {path, size > 0 ? static_cast<size_t>(size) : 0};
}

std::string below(int folder, const char* path) {
    return folder == AT_FDCWD || *path == '/' ? path : opened(folder) + "/" + path;
}

// What happens to a call: 0 nothing, 1 it does a part, -1 it fails with errno set.
int effect(long kind, const std::string& path) {
    static const std::string folder = std::string(getenv("LOCALRT_FAULT_FOLDER")) + "/";
    Control* const all = control();
    if (!(all->kinds & kind) || path.compare(0, folder.size(), folder) != 0) return 0;
    const long number = __atomic_add_fetch(&all->calls, 1, __ATOMIC_SEQ_CST);
    if (number < all->first || number > all->last) return 0;
    if (all->effect == SLOW) usleep(static_cast<useconds_t>(all->microseconds));
    if (all->effect > 0) errno = static_cast<int>(all->effect);
    return all->effect > 0 ? -1 : all->effect == SHORT;
}

size_t part(int what, size_t size) { return what == 1 && size > 1 ? size / 2 : size; }
}  // namespace

// Also under the name that programs with 64-bit offsets call.
#define CALL(kind, path, result, name, parameters, before, ...) \
    asm(".globl " #name "64\n.set " #name "64, " #name); \
    extern "C" result name parameters { \
        const int what = effect(kind, path); \
        if (what < 0) return -1; \
        before; \
        return reinterpret_cast<result(*) parameters>(dlsym(RTLD_NEXT, #name))(__VA_ARGS__); \
    }
#define HALF \
    const iovec half{list->iov_base, part(what, list->iov_len)}; \
    if (what == 1) { list = &half; count = 1; }
#define MODE \
    va_list rest; va_start(rest, flags); const mode_t mode = va_arg(rest, mode_t); va_end(rest)
#define IO(kind, name, pointer) \
    CALL(kind, opened(file), ssize_t, name, (int file, pointer data, size_t size), , file, data, part(what, size)) \
    CALL(kind, opened(file), ssize_t, p##name, (int file, pointer data, size_t size, off_t at), , file, data, part(what, size), at) \
    CALL(kind, opened(file), ssize_t, name##v, (int file, const iovec* list, int count), HALF, file, list, count) \
    CALL(kind, opened(file), ssize_t, p##name##v, (int file, const iovec* list, int count, off_t at), HALF, file, list, count, at) \
    CALL(kind, opened(file), ssize_t, p##name##v2, (int file, const iovec* list, int count, off_t at, int flags), HALF, file, list, count, at, flags) \
    asm(".globl p" #name "v64v2\n.set p" #name "v64v2, p" #name "v2");
#define ON_FILE(kind, name, parameters, ...) CALL(kind, opened(file), int, name, parameters, (void)what, __VA_ARGS__)
#define ON_PATH(kind, name, folder, parameters, ...) CALL(kind, below(folder, path), int, name, parameters, (void)what, __VA_ARGS__)
#define OPENING (flags & (O_WRONLY | O_RDWR | O_CREAT) ? CHANGE : OPEN)

IO(READ, read, void*)
IO(WRITE, write, const void*)
CALL(OPENING, below(AT_FDCWD, path), int, open, (const char* path, int flags, ...), MODE, path, flags, mode)
CALL(OPENING, below(folder, path), int, openat, (int folder, const char* path, int flags, ...), MODE, folder, path, flags, mode)
ON_FILE(SYNC, fsync, (int file), file)
ON_FILE(SYNC, fdatasync, (int file), file)
ON_FILE(CHANGE, ftruncate, (int file, off_t size), file, size)
ON_FILE(LOOK, fstat, (int file, struct stat* out), file, out)
ON_PATH(CHANGE, rename, AT_FDCWD, (const char* path, const char* to), path, to)
ON_PATH(CHANGE, mkdir, AT_FDCWD, (const char* path, mode_t mode), path, mode)
ON_PATH(CHANGE, unlink, AT_FDCWD, (const char* path), path)
ON_PATH(CHANGE, unlinkat, folder, (int folder, const char* path, int flags), folder, path, flags)
ON_PATH(LOOK, stat, AT_FDCWD, (const char* path, struct stat* out), path, out)
ON_PATH(LOOK, lstat, AT_FDCWD, (const char* path, struct stat* out), path, out)
ON_PATH(LOOK, fstatat, folder, (int folder, const char* path, struct stat* out, int flags), folder, path, out, flags)
asm(".globl posix_fallocate64\n.set posix_fallocate64, posix_fallocate");
extern "C" int posix_fallocate(int file, off_t at, off_t size) {  // it returns the error
    if (effect(CHANGE, opened(file)) < 0) return errno;
    return reinterpret_cast<int (*)(int, off_t, off_t)>(dlsym(RTLD_NEXT, "posix_fallocate"))(file, at, size);
}
