// Records the calls by which a process and its children change files below one folder, in one log.
//
// It is preloaded: it sees what is called by libc's symbols, not what libc itself calls. The
// campaign compares the folder with the log, so that a call that is missing here is noticed.
// POWERLOSS_FOLDER and POWERLOSS_LOG name both. A record is a line of the call's kind, a number and
// the lengths of two texts, and the texts: a path, and data or another path. It is there before
// the caller goes on, so calls that wait for one another are in order, in all processes.

#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>

using std::string, std::to_string;

static string path_of(int file) {
    char path[4096];
    ssize_t length = readlink(("/proc/self/fd/" + to_string(file)).c_str(), path, sizeof path);
    return string(path, length > 0 ? length : 0);
}

static string path_at(int folder, const char* path) {
    return path[0] == '/' ? path : path_of(folder) + "/" + path;
}

static void record(char kind, const string& path, const string& text = "", off_t number = 0) {
    const char* folder = getenv("POWERLOSS_FOLDER");
    if (!folder || path.rfind(string(folder) + "/", 0) != 0) return;
    static int log = open(getenv("POWERLOSS_LOG"), O_WRONLY | O_APPEND | O_CLOEXEC);
    string all = kind + (" " + to_string(number)) + " " + to_string(path.size()) + " ";
    all += to_string(text.size()) + "\n" + path + text;
    if (syscall(SYS_write, log, all.data(), all.size()) != ssize_t(all.size())) abort();
}

// Stands for a function of libc. One that is declared with "..." gets the same registers.
#define HOOK(type, name, parameters, arguments, ...)                    \
    extern "C" type my_##name parameters asm(#name);                    \
    type my_##name parameters {                                         \
        static auto real = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
        type done = real arguments;                                     \
        if (done >= 0) record(__VA_ARGS__);                             \
        return done;                                                    \
    }

HOOK(int, open, (const char* path, int flags, mode_t mode), (path, flags, mode),
     'o', flags & (O_CREAT | O_TRUNC) ? path : "", "", flags & O_TRUNC)
HOOK(ssize_t, write, (int file, const char* data, size_t size), (file, data, size),
     'w', path_of(file), string(data, done), lseek(file, 0, SEEK_CUR) - done)
HOOK(ssize_t, pwrite, (int file, const char* data, size_t size, off_t at), (file, data, size, at),
     'w', path_of(file), string(data, done), at)
HOOK(int, ftruncate, (int file, off_t length), (file, length), 't', path_of(file), "", length)
HOOK(int, fsync, (int file), (file), 's', path_of(file))
HOOK(int, fdatasync, (int file), (file), 's', path_of(file))
HOOK(int, mkdir, (const char* path, mode_t mode), (path, mode), 'm', path)
HOOK(int, rmdir, (const char* path), (path), 'u', path)
HOOK(int, unlink, (const char* path), (path), 'u', path)
HOOK(int, unlinkat, (int folder, const char* path, int flags), (folder, path, flags), 'u', path_at(folder, path))
HOOK(int, rename, (const char* from, const char* to), (from, to), 'r', to, from)
HOOK(int, symlink, (const char* target, const char* path), (target, path), 'l', path, target)

// Their other names, for large files.
asm(".irp name, open, pwrite, ftruncate\n .globl \\name\\()64\n .set \\name\\()64, \\name\n .endr");
