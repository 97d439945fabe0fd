// The start of a program, as old_glibc.c: since 2.34 glibc runs the constructors of a program by itself, before it was told by the start-up code
// how to, which here is linked for 2.34.
#if defined(__x86_64__)
#define FIRST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FIRST "GLIBC_2.17"
#endif

typedef int Main(int, char**, char**);
typedef void Hook(void);
typedef void Constructor(int, char**, char**);

int oldest_start(Main* program, int argc, char** argv, Constructor* init, Hook* fini, Hook* loader_fini, void* stack_end);
__asm__(".symver oldest_start,__libc_start_main@" FIRST);

void _init(void);
extern Constructor *__init_array_start[], *__init_array_end[];

static void construct(int argc, char** argv, char** environment) {
  _init();
  for (Constructor** constructor = __init_array_start; constructor != __init_array_end; ++constructor) (*constructor)(argc, argv, environment);
}

// Destructors are the loader's, in every version.
int __libc_start_main(Main* program, int argc, char** argv, Constructor* init, Hook* fini, Hook* loader_fini, void* stack_end);
int __libc_start_main(Main* program, int argc, char** argv, Constructor* init, Hook* fini, Hook* loader_fini, void* stack_end) {
  return oldest_start(program, argc, argv, init ? init : construct, fini, loader_fini, stack_end);
}
