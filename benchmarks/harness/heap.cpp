// Counts the bytes of the heap that a process has in use, those of all its threads, and the most since it was asked.
// Preloaded (LD_PRELOAD), it stands in front of glibc's allocator, so that what threads of gloo free is seen as well.

#include <errno.h>
#include <malloc.h>
#include <stddef.h>

extern "C" {
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);
}

static long used, most;

static void *took(void *block) {
    if (block) {
        long size = static_cast<long>(malloc_usable_size(block)), now = __atomic_add_fetch(&used, size, __ATOMIC_RELAXED);
        long seen = __atomic_load_n(&most, __ATOMIC_RELAXED);
        while (now > seen && !__atomic_compare_exchange_n(&most, &seen, now, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
    }
    return block;
}

static void gave(long size) { __atomic_sub_fetch(&used, size, __ATOMIC_RELAXED); }

#define PUBLIC extern "C" __attribute__((visibility("default")))
PUBLIC void *malloc(size_t size) { return took(__libc_malloc(size)); }
PUBLIC void *calloc(size_t count, size_t size) { return took(__libc_calloc(count, size)); }
PUBLIC void *memalign(size_t alignment, size_t size) { return took(__libc_memalign(alignment, size)); }
PUBLIC void *aligned_alloc(size_t alignment, size_t size) { return took(__libc_memalign(alignment, size)); }
PUBLIC int posix_memalign(void **block, size_t alignment, size_t size) {
    *block = took(__libc_memalign(alignment, size));
    return *block ? 0 : ENOMEM;
}
PUBLIC void free(void *block) {
    if (block) gave(static_cast<long>(malloc_usable_size(block)));
    __libc_free(block);
}
PUBLIC void *realloc(void *block, size_t size) {
    long before = block ? static_cast<long>(malloc_usable_size(block)) : 0;
    void *moved = __libc_realloc(block, size);
    // a block that cannot be made larger stays as it was
    if (moved || size == 0) gave(before);
    return took(moved);
}

PUBLIC long heap_used() { return __atomic_load_n(&used, __ATOMIC_RELAXED); }
PUBLIC long heap_most() { return __atomic_load_n(&most, __ATOMIC_RELAXED); }
PUBLIC void heap_begin() { __atomic_store_n(&most, heap_used(), __ATOMIC_RELAXED); }
