// Runs kernels of a host library for another process, possibly of another processor family: `test_arm64.py` runs it in
// an emulator. Memory is shared, at the same address in both processes.
//
//   kernel_server <library> <file of the memory> <its address> <its bytes>
//
// then for each line `<kernel> <number of integers> <integers> <number of doubles> <doubles>` on the input runs the kernel
// and answers with a line. Integers and doubles are separate because calls pass them in different registers.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

typedef long long i64;
constexpr int INTEGERS = 12, DOUBLES = 2;
typedef void (*Kernel)(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, double, double);

static void fail(const char *what) {
    fprintf(stderr, "kernel_server: %s\n", what);
    exit(1);
}

static void read_call(i64 (&integer)[INTEGERS], double (&real)[DOUBLES]) {
    int count;
    if (scanf("%d", &count) != 1 || count > INTEGERS) fail("too many integers");
    for (int i = 0; i < count; ++i)
        if (scanf("%lld", &integer[i]) != 1) fail("no integer");
    if (scanf("%d", &count) != 1 || count > DOUBLES) fail("too many doubles");
    for (int i = 0; i < count; ++i)
        if (scanf("%la", &real[i]) != 1) fail("no double");
}

int main(int, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) fail(dlerror());
    void *where = (void *)strtoull(argv[3], nullptr, 0);
    const size_t nbytes = strtoull(argv[4], nullptr, 0);
    const int file = open(argv[2], O_RDWR);
    if (mmap(where, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0) != where) fail("no memory there");
    puts("ready");
    fflush(stdout);
    char name[64];
    while (scanf("%63s", name) == 1) {
        i64 i[INTEGERS] = {};
        double d[DOUBLES] = {};
        read_call(i, d);
        Kernel kernel = (Kernel)dlsym(library, name);
        if (!kernel) fail(dlerror());
        kernel(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], d[0], d[1]);
        puts("done");
        fflush(stdout);
    }
}
