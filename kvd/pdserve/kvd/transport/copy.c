/* Copies runs of bytes within one address range: the inner loop of same-node copies.
 *
 * Plain C without Python's API: any interpreter loads it through ctypes, which lets go of the
 * interpreter lock around the call. mover.py is its only caller and hatch_build.py compiles it.
 */

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#ifndef PDSERVE_COPY_SOURCE
#error "PDSERVE_COPY_SOURCE must be the SHA-256 of this file, in quotes"
#endif

enum {
    LINE = 64,
    PAGE = 4096,
    BATCH = 1 << 20, /* bytes between two looks at `stop`: some 100 us */
};

/* Which copy.c this was built from. */
const char *pdserve_copy_source(void)
{
    return PDSERVE_COPY_SOURCE;
}

#ifdef __SSE2__

static void stream_line(char *dst, const char *src)
{
    for (size_t at = 0; at < LINE; at += sizeof(__m128i))
        _mm_stream_si128((__m128i *)(dst + at), _mm_loadu_si128((const __m128i *)(src + at)));
}

/* KV is not read again by who copies it, so stores that pass by the caches save fetching every
 * line that is about to be overwritten. Two pages at a time give the memory two streams each way
 * to work on, and let the walks to their page tables overlap. */
static void copy_run(char *dst, const char *src, size_t length)
{
    if (length >= 2 * PAGE) {
        size_t head = -(uintptr_t)dst % LINE; /* a streamed store needs an aligned destination */
        memcpy(dst, src, head);
        dst += head, src += head, length -= head;
        for (; length >= 2 * PAGE; dst += 2 * PAGE, src += 2 * PAGE, length -= 2 * PAGE)
            for (size_t at = 0; at < PAGE; at += LINE) {
                stream_line(dst + at, src + at);
                stream_line(dst + PAGE + at, src + PAGE + at);
            }
    }
    memcpy(dst, src, length);
}

/* Streamed stores may be seen late: whoever is told that the copy is done must find them. */
static void settle(void)
{
    _mm_sfence();
}

#else

static void copy_run(char *dst, const char *src, size_t length)
{
    memcpy(dst, src, length);
}

static void settle(void)
{
}

#endif

/* Copies length[i] bytes from base + src[i] to base + dst[i], for each of `runs`; no source may
 * overlap a destination, and nothing is checked. `stop` is looked at before the first byte and
 * after every BATCH; when it is not zero, the rest is left out. The bytes copied. */
uint64_t pdserve_copy(char *base, const uint64_t *dst, const uint64_t *src, const uint64_t *length, size_t runs,
                      const _Atomic int32_t *stop)
{
    uint64_t moved = 0;
    size_t since = BATCH;

    for (size_t i = 0; i < runs; i++) {
        if (i + 1 < runs) { /* its page walks begin while this run is copied */
            __builtin_prefetch(base + src[i + 1], 0);
            __builtin_prefetch(base + dst[i + 1], 1);
        }
        for (uint64_t at = 0; at < length[i];) {
            if (since >= BATCH) {
                if (atomic_load_explicit(stop, memory_order_relaxed))
                    goto out;
                since = 0;
            }
            size_t part = length[i] - at < BATCH ? (size_t)(length[i] - at) : BATCH;
            copy_run(base + dst[i] + at, base + src[i] + at, part);
            at += part;
            since += part;
            moved += part;
        }
    }
out:
    settle();
    return moved;
}
