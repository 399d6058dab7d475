// memcpy, memmove, memcmp and bcmp for the static program. Those of musl copy everything with `rep movsq`, which takes
// some 30 cycles to start, and compare byte by byte; most copies of a proxy have 20 to 300 bytes. The build script
// compiles this file for musl on x86-64, and the linker takes it before musl's. tests/packages/memory.c is its test.

#include <stddef.h>
#include <stdint.h>

// Unaligned loads and stores that may alias every type.
typedef uint16_t u16 __attribute__((may_alias, aligned(1)));
typedef uint32_t u32 __attribute__((may_alias, aligned(1)));
typedef uint64_t u64 __attribute__((may_alias, aligned(1)));
typedef long long v16 __attribute__((vector_size(16), may_alias, aligned(1)));

#define AT(type, base, offset) (*(type *)((char *)(base) + (offset)))
#define GET(type, base, offset) (*(const type *)((const char *)(base) + (offset)))

// From this size on the processor's own copy is faster than a loop.
enum { REP_FROM = 2048 };

// Up to 16 bytes. All loads stand before the stores: the ranges may overlap.
static inline void move_to_16(char *to, const char *from, size_t n) {
  if (n >= 8) {
    u64 head = GET(u64, from, 0), tail = GET(u64, from, n - 8);
    AT(u64, to, 0) = head;
    AT(u64, to, n - 8) = tail;
  } else if (n >= 4) {
    u32 head = GET(u32, from, 0), tail = GET(u32, from, n - 4);
    AT(u32, to, 0) = head;
    AT(u32, to, n - 4) = tail;
  } else if (n >= 2) {
    u16 head = GET(u16, from, 0), tail = GET(u16, from, n - 2);
    AT(u16, to, 0) = head;
    AT(u16, to, n - 2) = tail;
  } else if (n) {
    *to = *from;
  }
}

// 17 to 128 bytes, from both ends towards the middle. All loads stand before the stores.
static inline void move_to_128(char *to, const char *from, size_t n) {
  v16 h0 = GET(v16, from, 0), t0 = GET(v16, from, n - 16);
  if (n > 32) {
    v16 h1 = GET(v16, from, 16), t1 = GET(v16, from, n - 32);
    if (n > 64) {
      v16 h2 = GET(v16, from, 32), t2 = GET(v16, from, n - 48);
      v16 h3 = GET(v16, from, 48), t3 = GET(v16, from, n - 64);
      AT(v16, to, 32) = h2;
      AT(v16, to, 48) = h3;
      AT(v16, to, n - 64) = t3;
      AT(v16, to, n - 48) = t2;
    }
    AT(v16, to, 16) = h1;
    AT(v16, to, n - 32) = t1;
  }
  AT(v16, to, 0) = h0;
  AT(v16, to, n - 16) = t0;
}

// More than 128 bytes, ascending: no byte of `from` that is still needed is overwritten, because `to` is not inside
// the range of `from`, or below it. The tail is loaded first and stored last.
static inline void move_up(char *to, const char *from, size_t n) {
  v16 t0 = GET(v16, from, n - 16), t1 = GET(v16, from, n - 32);
  v16 t2 = GET(v16, from, n - 48), t3 = GET(v16, from, n - 64);
  char *end = to + n;
  for (; n > 64; n -= 64, to += 64, from += 64) {
    v16 a = GET(v16, from, 0), b = GET(v16, from, 16), c = GET(v16, from, 32), d = GET(v16, from, 48);
    AT(v16, to, 0) = a;
    AT(v16, to, 16) = b;
    AT(v16, to, 32) = c;
    AT(v16, to, 48) = d;
  }
  AT(v16, end, -64) = t3;
  AT(v16, end, -48) = t2;
  AT(v16, end, -32) = t1;
  AT(v16, end, -16) = t0;
}

// More than 128 bytes, descending: `to` is inside the range of `from`. The head is loaded first and stored last.
static inline void move_down(char *to, const char *from, size_t n) {
  v16 h0 = GET(v16, from, 0), h1 = GET(v16, from, 16), h2 = GET(v16, from, 32), h3 = GET(v16, from, 48);
  for (; n > 64; n -= 64) {
    v16 a = GET(v16, from, n - 16), b = GET(v16, from, n - 32), c = GET(v16, from, n - 48), d = GET(v16, from, n - 64);
    AT(v16, to, n - 16) = a;
    AT(v16, to, n - 32) = b;
    AT(v16, to, n - 48) = c;
    AT(v16, to, n - 64) = d;
  }
  AT(v16, to, 48) = h3;
  AT(v16, to, 32) = h2;
  AT(v16, to, 16) = h1;
  AT(v16, to, 0) = h0;
}

void *memmove(void *dest, const void *src, size_t n) {
  char *to = dest;
  const char *from = src;
  if (n <= 16) {
    move_to_16(to, from, n);
  } else if (n <= 128) {
    move_to_128(to, from, n);
  } else if ((uintptr_t)to - (uintptr_t)from >= n) {
    move_up(to, from, n);
  } else {
    move_down(to, from, n);
  }
  return dest;
}

void *memcpy(void *restrict dest, const void *restrict src, size_t n) {
  char *to = dest;
  const char *from = src;
  if (n <= 16) {
    move_to_16(to, from, n);
  } else if (n <= 128) {
    move_to_128(to, from, n);
  } else if (n < REP_FROM) {
    move_up(to, from, n);
  } else {
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n) : : "memory");
  }
  return dest;
}

// The order of two groups of eight bytes, by their first byte that differs.
static inline int order(u64 a, u64 b) {
  a = __builtin_bswap64(a);
  b = __builtin_bswap64(b);
  return (a > b) - (a < b);
}

int memcmp(const void *left, const void *right, size_t n) {
  const unsigned char *l = left, *r = right;
  if (n >= 8) {
    size_t at = 0;
    for (; at < n - 8; at += 8) {
      u64 a = GET(u64, l, at), b = GET(u64, r, at);
      if (a != b) return order(a, b);
    }
    return order(GET(u64, l, n - 8), GET(u64, r, n - 8));
  }
  for (; n; n--, l++, r++) {
    if (*l != *r) return *l - *r;
  }
  return 0;
}

int bcmp(const void *left, const void *right, size_t n) {
  if (n >= 8) {
    for (size_t at = 0; at < n - 8; at += 8) {
      if (GET(u64, left, at) != GET(u64, right, at)) return 1;
    }
    return GET(u64, left, n - 8) != GET(u64, right, n - 8);
  }
  if (n >= 4) return GET(u32, left, 0) != GET(u32, right, 0) || GET(u32, left, n - 4) != GET(u32, right, n - 4);
  if (n >= 2) return GET(u16, left, 0) != GET(u16, right, 0) || GET(u16, left, n - 2) != GET(u16, right, n - 2);
  return n && *(const unsigned char *)left != *(const unsigned char *)right;
}
