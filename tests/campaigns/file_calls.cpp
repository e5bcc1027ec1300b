// Preloaded by campaigns: makes calls on files below $LOCALRT_FILES misbehave, or records those that change files.
//
// It sees what is called by libc's symbols, not what libc itself calls. If $LOCALRT_FILES_CONTROL is given, it is a file
// that is shared as `Control`. If $LOCALRT_FILES_LOG is, changes by this process and its children are appended to it: a
// line of the kind of call, a number and the lengths of two texts, and the texts: a path, and data or another path. A
// record is there before the caller goes on, so calls that wait for one another are in order, in all processes. The
// campaign compares the folder with the log, so that a call that is not recorded is noticed.
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
using std::string, std::to_string;

enum Kind { READ = 1, WRITE = 2, OPEN = 4, CHANGE = 8, SYNC = 16, LOOK = 32 };
enum { SHORT = -1, SLOW = -2 };  // effects that are no error numbers

// Calls number `first` to `last` of these `kinds` have the `effect`; `calls` counts all of them.
struct Control { long calls, first, last, kinds, effect, microseconds; };

int given(const char* name, int flags) {
    const char* const path = getenv(name);
    return path ? static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0)) : -1;
}

Control* control() {
    static void* const shared = mmap(
        nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, given("LOCALRT_FILES_CONTROL", O_RDWR), 0);
    return shared == MAP_FAILED ? nullptr : static_cast<Control*>(shared);
}

bool is_watched(const string& path) {
    static const string folder = string(getenv("LOCALRT_FILES")) + "/";
    return path.compare(0, folder.size(), folder) == 0;
}

string opened(int file) {
    char path[PATH_MAX];
    const ssize_t size = readlink(("/proc/self/fd/" + to_string(file)).c_str(), path, sizeof path);
    return {path, size > 0 ? static_cast<size_t>(size) : 0};
}

string below(int folder, const char* path) {
    return folder == AT_FDCWD || *path == '/' ? path : opened(folder) + "/" + path;
}

// What happens to a call: 0 nothing, 1 it does a part, -1 it fails with errno set.
int effect(long kind, const string& path) {
    Control* const all = control();
    if (!all || !(all->kinds & kind) || !is_watched(path)) return 0;
    const long number = __atomic_add_fetch(&all->calls, 1, __ATOMIC_SEQ_CST);
    if (number < all->first || number > all->last) return 0;
    if (all->effect == SLOW) usleep(static_cast<useconds_t>(all->microseconds));
    if (all->effect > 0) errno = static_cast<int>(all->effect);
    return all->effect > 0 ? -1 : all->effect == SHORT;
}

void record(char kind, const string& path, const string& text = "", off_t number = 0) {
    static const int log = given("LOCALRT_FILES_LOG", O_WRONLY | O_APPEND);
    if (log < 0 || !is_watched(path)) return;
    const string sizes = to_string(path.size()) + " " + to_string(text.size());
    const string all = kind + (" " + to_string(number)) + " " + sizes + "\n" + path + text;
    if (syscall(SYS_write, log, all.data(), all.size()) != static_cast<ssize_t>(all.size())) abort();
}

size_t part(int what, size_t size) { return what == 1 && size > 1 ? size / 2 : size; }
}  // namespace

// `after` records a call that has succeeded. Also under the name that programs with 64-bit offsets call.
#define CALL(kind, place, result, name, parameters, before, after, ...) \
    asm(".globl " #name "64\n.set " #name "64, " #name); \
    extern "C" result name parameters { \
        [[maybe_unused]] const int what = effect(kind, place); \
        if (what < 0) return -1; \
        before; \
        const result done = reinterpret_cast<result(*) parameters>(dlsym(RTLD_NEXT, #name))(__VA_ARGS__); \
        if (done >= 0) { after; } \
        return done; \
    }
#define HALF \
    const iovec half{list->iov_base, part(what, list->iov_len)}; \
    if (what == 1) { list = &half; count = 1; }
#define MODE \
    va_list rest; va_start(rest, flags); const mode_t mode = va_arg(rest, mode_t); va_end(rest)
#define WRITTEN(kind, at) \
    if (kind == WRITE) record('w', opened(file), string(static_cast<const char*>(data), static_cast<size_t>(done)), at)
#define IO(kind, name, pointer) \
    CALL(kind, opened(file), ssize_t, name, (int file, pointer data, size_t size), , WRITTEN(kind, lseek(file, 0, SEEK_CUR) - done), file, data, part(what, size)) \
    CALL(kind, opened(file), ssize_t, p##name, (int file, pointer data, size_t size, off_t at), , WRITTEN(kind, at), file, data, part(what, size), at) \
    CALL(kind, opened(file), ssize_t, name##v, (int file, const iovec* list, int count), HALF, , file, list, count) \
    CALL(kind, opened(file), ssize_t, p##name##v, (int file, const iovec* list, int count, off_t at), HALF, , file, list, count, at) \
    CALL(kind, opened(file), ssize_t, p##name##v2, (int file, const iovec* list, int count, off_t at, int flags), HALF, , file, list, count, at, flags) \
    asm(".globl p" #name "v64v2\n.set p" #name "v64v2, p" #name "v2");
#define ON_FILE(kind, name, after, parameters, ...) CALL(kind, opened(file), int, name, parameters, , after, __VA_ARGS__)
#define ON_PATH(kind, name, folder, after, parameters, ...) CALL(kind, below(folder, path), int, name, parameters, , after, __VA_ARGS__)
#define OPENING (flags & (O_WRONLY | O_RDWR | O_CREAT) ? CHANGE : OPEN)

IO(READ, read, void*)
IO(WRITE, write, const void*)
CALL(OPENING, below(AT_FDCWD, path), int, open, (const char* path, int flags, ...), MODE, record('o', flags & (O_CREAT | O_TRUNC) ? path : "", "", flags & O_TRUNC), path, flags, mode)
CALL(OPENING, below(folder, path), int, openat, (int folder, const char* path, int flags, ...), MODE, , folder, path, flags, mode)
ON_FILE(SYNC, fsync, record('s', opened(file)), (int file), file)
ON_FILE(SYNC, fdatasync, record('s', opened(file)), (int file), file)
ON_FILE(CHANGE, ftruncate, record('t', opened(file), "", size), (int file, off_t size), file, size)
ON_FILE(LOOK, fstat, , (int file, struct stat* out), file, out)
ON_PATH(CHANGE, rename, AT_FDCWD, record('r', to, path), (const char* path, const char* to), path, to)
ON_PATH(CHANGE, mkdir, AT_FDCWD, record('m', path), (const char* path, mode_t mode), path, mode)
ON_PATH(0, symlink, AT_FDCWD, record('l', path, target), (const char* target, const char* path), target, path)
ON_PATH(0, rmdir, AT_FDCWD, record('u', path), (const char* path), path)
ON_PATH(CHANGE, unlink, AT_FDCWD, record('u', path), (const char* path), path)
ON_PATH(CHANGE, unlinkat, folder, record('u', below(folder, path)), (int folder, const char* path, int flags), folder, path, flags)
ON_PATH(LOOK, stat, AT_FDCWD, , (const char* path, struct stat* out), path, out)
ON_PATH(LOOK, lstat, AT_FDCWD, , (const char* path, struct stat* out), path, out)
ON_PATH(LOOK, fstatat, folder, , (int folder, const char* path, struct stat* out, int flags), folder, path, out, flags)
asm(".globl posix_fallocate64\n.set posix_fallocate64, posix_fallocate");
extern "C" int posix_fallocate(int file, off_t at, off_t size) {  // it returns the error
    if (effect(CHANGE, opened(file)) < 0) return errno;
    return reinterpret_cast<int (*)(int, off_t, off_t)>(dlsym(RTLD_NEXT, "posix_fallocate"))(file, at, size);
}
