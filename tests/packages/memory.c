// Compares the functions of src/musl/memory.c with plain loops: every size up to 400 at every alignment, every distance
// of overlapping ranges, and sizes around the bounds. tests/packages/run compiles both files, with the prefix keyward_
// for the functions, and runs this. Prints the first difference and ends with 1.

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#define ROOM 24000

void *keyward_memcpy(void *, const void *, size_t);
void *keyward_memmove(void *, const void *, size_t);
int keyward_memcmp(const void *, const void *, size_t);
int keyward_bcmp(const void *, const void *, size_t);

static unsigned char source[ROOM], got[ROOM], expected[ROOM];
static unsigned long checks;

static void check(int good, const char *function, size_t size, long where) {
  checks++;
  if (!good) {
    printf("%s is wrong: size %zu, offset or distance %ld\n", function, size, where);
    exit(1);
  }
}

// Not memcmp of the library, which may be the function under test.
static int same(const unsigned char *a, const unsigned char *b, size_t n) {
  for (size_t i = 0; i < n; i++) {
    if (a[i] != b[i]) return 0;
  }
  return 1;
}

static int sign(int n) { return (n > 0) - (n < 0); }

static void fill(void) {
  static unsigned state = 1;
  for (size_t i = 0; i < ROOM; i++) {
    state = state * 1103515245 + 12345;
    source[i] = state >> 16;
    got[i] = expected[i] = ~source[i];
  }
}

// memcpy between ranges that do not overlap: neither the bytes before nor those behind change.
static void copies(size_t size, size_t from, size_t to) {
  size_t end = to + size + 64;
  for (size_t i = 0; i < end; i++) got[i] = expected[i] = 0xA5 ^ i;
  for (size_t i = 0; i < size; i++) expected[to + i] = source[from + i];
  check(keyward_memcpy(got + to, source + from, size) == got + to && same(got, expected, end), "memcpy", size, from);
}

// memmove inside one buffer, `distance` bytes up or down.
static void moves(size_t size, long distance) {
  size_t from = 8000, to = from + distance, low = from < to ? from : to, high = (from > to ? from : to) + size;
  for (size_t i = low - 64; i < high + 64; i++) got[i] = expected[i] = source[i];
  for (size_t i = 0; i < size; i++) expected[to + i] = source[from + i];
  void *result = keyward_memmove(got + to, got + from, size);
  check(result == got + to && same(got + low - 64, expected + low - 64, high - low + 128), "memmove", size, distance);
}

// The comparisons of two equal ranges, and of two that differ at `at`, and again behind it the other way.
static void compares(size_t size, size_t left, size_t right, size_t at) {
  unsigned char *l = got + left, *r = expected + 1024 + right;
  for (size_t i = 0; i < size; i++) l[i] = r[i] = source[i];
  l[size] = 1;
  r[size] = 2;
  check(keyward_memcmp(l, r, size) == 0 && keyward_bcmp(l, r, size) == 0, "equal memcmp or bcmp", size, left);
  if (at < size) {
    l[at] ^= 0x80;
    if (at + 1 < size) r[at + 1] += l[at] > r[at] ? 1 : -1;
    check(sign(keyward_memcmp(l, r, size)) == sign(l[at] - r[at]), "memcmp", size, at);
    check(sign(keyward_memcmp(r, l, size)) == sign(r[at] - l[at]), "memcmp", size, at);
    check(keyward_bcmp(l, r, size) != 0, "bcmp", size, at);
  }
}

int main(void) {
  static const size_t large[] = {1000, 1023, 1024, 2047, 2048, 2049, 4095, 4096, 6000};
  fill();
  for (size_t size = 0; size <= 400; size++) {
    for (size_t offset = 0; offset < 256; offset++) copies(size, offset % 16, 64 + offset / 16);
    for (long distance = -420; distance <= 420; distance++) moves(size, distance);
    for (size_t at = 0; at <= size; at++) compares(size, at % 16, at / 16 % 16, at);
  }
  for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
    for (size_t offset = 0; offset < 256; offset++) copies(large[i], offset % 16, 64 + offset / 16);
    for (long distance = -200; distance <= 200; distance++) moves(large[i], distance);
    moves(large[i], (long)large[i] - 1);
    moves(large[i], 1 - (long)large[i]);
    for (size_t at = 0; at < 1000; at += 7) compares(large[i] < 4096 ? large[i] : 4096, at % 16, at / 16 % 16, at);
  }
  printf("%lu checks of memcpy, memmove, memcmp and bcmp\n", checks);
  return 0;
}
