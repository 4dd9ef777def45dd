// The operations of simt.cuh on a host processor: every thread of a block is a fiber, a warp operation lets each lane
// leave its operands and run on once all 32 have come. For tests of kernel logic without a GPU; nothing here is fast.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <ucontext.h>

#define LKV_DEVICE inline
#define LKV_NOINLINE inline
#ifndef LOOPKV_BULK_COPY
#define LOOPKV_BULK_COPY 1
#endif

namespace loopkv {

struct alignas(16) Vec4 {
  uint32_t x, y, z, w;
};
struct alignas(8) Vec2 {
  uint32_t x, y;
};

namespace emulation {

struct Exchange {  // operands of one warp operation, two generations so that no lane waits for the slowest reader
  uint64_t words[2][32][8];
  int arrived = 0;
  int generation = 0;
};

struct Block {
  std::vector<Exchange> warps;
  bool votes[2] = {false, false};
  int arrived = 0;  // at the block barrier
  int generation = 0;
  int threads = 0, id = 0, count = 1;
  int64_t clock = 0;
};

struct Fiber {
  ucontext_t context;
  std::vector<uint8_t> stack;
  bool done = false;
};

inline Block* block = nullptr;
inline int thread = 0;
inline ucontext_t scheduler;
inline std::vector<Fiber>* fibers = nullptr;

inline void yield() {
  const int mine = thread;
  swapcontext(&(*fibers)[mine].context, &scheduler);
  thread = mine;
}

// Leaves `count` words and returns everybody's once all lanes have come.
inline const uint64_t (*exchange(const uint64_t* words, int count))[8] {
  Exchange& warp = block->warps[thread / 32];
  const int generation = warp.generation, slot = generation & 1;
  for (int i = 0; i < count; ++i) warp.words[slot][thread % 32][i] = words[i];
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
  }
  while (warp.generation == generation) yield();
  return warp.words[slot];
}

inline std::function<void()>* body = nullptr;
inline void entry() {
  (*body)();
  (*fibers)[thread].done = true;
  swapcontext(&(*fibers)[thread].context, &scheduler);
}

// Runs `threads` fibers of one block to their end.
inline void run_block(int id, int count, int threads, std::function<void()> kernel) {
  Block state;
  state.warps.resize((threads + 31) / 32);
  state.threads = threads;
  state.id = id;
  state.count = count;
  std::vector<Fiber> all(threads);
  block = &state;
  fibers = &all;
  body = &kernel;
  for (int i = 0; i < threads; ++i) {
    all[i].stack.resize(256 << 10);
    getcontext(&all[i].context);
    all[i].context.uc_stack.ss_sp = all[i].stack.data();
    all[i].context.uc_stack.ss_size = all[i].stack.size();
    all[i].context.uc_link = nullptr;
    makecontext(&all[i].context, entry, 0);
  }
  for (int left = threads; left > 0;) {
    left = 0;
    for (int i = 0; i < threads; ++i) {
      if (all[i].done) continue;
      ++left;
      thread = i;
      swapcontext(&scheduler, &all[i].context);
    }
  }
  block = nullptr;
}

inline float half_value(uint16_t bits) {
  _Float16 h;
  std::memcpy(&h, &bits, 2);
  return static_cast<float>(h);
}
inline uint16_t half_bits(float x) {
  const _Float16 h = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &h, 2);
  return bits;
}
inline float bfloat_value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}
inline uint16_t bfloat_bits(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1)) >> 16);
}

template <typename Value>
inline void multiply(float (&c)[4], const uint32_t (&operands)[6], Value value) {
  uint64_t mine[6];
  for (int i = 0; i < 6; ++i) mine[i] = operands[i];
  const auto all = exchange(mine, 6);
  const int r = thread % 32 / 4, t = thread % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = r, high = i >> 1, column = 2 * t + (i & 1);
    double sum = 0.0;
    for (int lane = 0; lane < 4; ++lane) {
      for (int half = 0; half < 2; ++half) {  // columns 2 t' and 2 t' + 8 of A
        const uint32_t a = static_cast<uint32_t>(all[4 * row + lane][high + 2 * half]);
        const uint32_t b = static_cast<uint32_t>(all[4 * column + lane][4 + half]);
        sum += static_cast<double>(value(a & 0xffff)) * value(b & 0xffff);
        sum += static_cast<double>(value(a >> 16)) * value(b >> 16);
      }
    }
    c[i] = static_cast<float>(c[i] + sum);
  }
}

template <typename B>
inline void multiply_bytes(int (&c)[4], const uint32_t (&operands)[6]) {
  uint64_t mine[6];
  for (int i = 0; i < 6; ++i) mine[i] = operands[i];
  const auto all = exchange(mine, 6);
  const int r = thread % 32 / 4, t = thread % 4;
  for (int i = 0; i < 4; ++i) {
    const int high = i >> 1, column = 2 * t + (i & 1);
    for (int lane = 0; lane < 4; ++lane) {
      for (int half = 0; half < 2; ++half) {  // columns 4 t' .. and 4 t' + 16 .. of A
        const uint32_t a = static_cast<uint32_t>(all[4 * r + lane][high + 2 * half]);
        const uint32_t b = static_cast<uint32_t>(all[4 * column + lane][4 + half]);
        for (int shift = 0; shift < 32; shift += 8) {
          c[i] += static_cast<int>(a >> shift & 0xff) * static_cast<B>(b >> shift & 0xff);
        }
      }
    }
  }
}

}  // namespace emulation

inline int lane_id() { return emulation::thread % 32; }
inline int forget(int x) { return x; }
inline int thread_id() { return emulation::thread; }
inline int block_threads() { return emulation::block->threads; }
inline int block_id() { return emulation::block->id; }
inline int block_count() { return emulation::block->count; }
inline void sync_warp() { emulation::exchange(nullptr, 0); }
inline void sync_block() {
  emulation::Block& b = *emulation::block;
  const int generation = b.generation;
  if (++b.arrived == b.threads) {
    b.arrived = 0;
    ++b.generation;
  }
  while (b.generation == generation) emulation::yield();
}
inline void spin_pause() { emulation::yield(); }
inline int64_t clock_cycles() { return emulation::block->clock += 64; }

template <typename T>
inline T shfl(T value, int source) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  const auto all = emulation::exchange(&word, 1);
  T result;
  std::memcpy(&result, &all[source & 31][0], sizeof(T));
  return result;
}
template <typename T>
inline T shfl_xor(T value, int mask) {
  return shfl(value, lane_id() ^ mask);
}
template <typename T>
inline T shfl_up(T value, int delta) {
  return shfl(value, lane_id() >= delta ? lane_id() - delta : lane_id());
}
inline uint32_t ballot(bool predicate) {
  const uint64_t word = predicate;
  const auto all = emulation::exchange(&word, 1);
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(all[i][0]) << i;
  return bits;
}
inline bool any(bool predicate) { return ballot(predicate) != 0; }
inline bool any_in_block(bool predicate) {
  emulation::Block& b = *emulation::block;
  const int slot = b.generation & 1;
  if (b.arrived == 0) b.votes[slot] = false;
  b.votes[slot] |= predicate;
  sync_block();
  return b.votes[slot];
}
template <typename T>
inline T warp_max(T x) {
  uint64_t word = 0;
  std::memcpy(&word, &x, sizeof(T));
  const auto all = emulation::exchange(&word, 1);
  for (int i = 0; i < 32; ++i) {
    T other;
    std::memcpy(&other, &all[i][0], sizeof(T));
    x = other > x ? other : x;
  }
  return x;
}
inline int popcount(uint32_t bits) { return __builtin_popcount(bits); }
inline uint32_t rotate_left(uint32_t x, int by) { return (by & 31) ? x << (by & 31) | x >> (32 - (by & 31)) : x; }

inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float exp2_fast(float x) { return std::exp2(x); }

template <uint32_t MASK>
inline uint32_t select_bits(uint32_t a, uint32_t b) {
  return (a & MASK) | (b & ~MASK);
}
template <uint32_t SELECTOR>
inline uint32_t permute_bytes(uint32_t a, uint32_t b) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(both >> (8 * (SELECTOR >> (4 * i) & 7)) & 0xff) << (8 * i);
  return result;
}

inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return result;
}

inline void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulation::multiply(c, {a0, a1, a2, a3, b0, b1}, emulation::half_value);
}
inline void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulation::multiply(c, {a0, a1, a2, a3, b0, b1}, emulation::bfloat_value);
}
inline void mma_u8u8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulation::multiply_bytes<uint8_t>(c, {a0, a1, a2, a3, b0, b1});
}
inline void mma_u8s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulation::multiply_bytes<int8_t>(c, {a0, a1, a2, a3, b0, b1});
}
inline uint32_t transpose_8x8(uint32_t x) {
  const uint64_t word = x;
  const auto all = emulation::exchange(&word, 1);
  const int row = lane_id() / 4, column = 2 * (lane_id() % 4);
  auto element = [&](int i, int j) { return static_cast<uint32_t>(all[4 * i + j / 2][0]) >> (16 * (j & 1)) & 0xffff; };
  return element(column, row) | element(column + 1, row) << 16;
}

template <bool TRANSPOSED>
inline Vec4 load_matrices(const void* row) {
  const uint64_t address = reinterpret_cast<uintptr_t>(row);
  if (address % 16 != 0) std::abort();
  const auto all = emulation::exchange(&address, 1);
  uint32_t result[4];
  const int r = lane_id() / 4, t = lane_id() % 4;
  for (int i = 0; i < 4; ++i) {
    auto element = [&](int j, int k) {
      uint16_t x;
      std::memcpy(&x, reinterpret_cast<const uint8_t*>(all[8 * i + j][0]) + 2 * k, 2);
      return static_cast<uint32_t>(x);
    };
    result[i] = TRANSPOSED ? element(2 * t, r) | element(2 * t + 1, r) << 16
                           : element(r, 2 * t) | element(r, 2 * t + 1) << 16;
  }
  return {result[0], result[1], result[2], result[3]};
}

inline uint32_t pack_half2(float low, float high) {
  return emulation::half_bits(low) | static_cast<uint32_t>(emulation::half_bits(high)) << 16;
}
inline uint32_t pack_bfloat2(float low, float high) {
  return emulation::bfloat_bits(low) | static_cast<uint32_t>(emulation::bfloat_bits(high)) << 16;
}
inline uint32_t mul_half2(uint32_t a, uint32_t b) {
  using emulation::half_value;
  return pack_half2(half_value(a & 0xffff) * half_value(b & 0xffff), half_value(a >> 16) * half_value(b >> 16));
}
inline uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
  using emulation::half_value;
  auto one = [](float x, float y, float z) { return static_cast<float>(static_cast<double>(x) * y + z); };
  return pack_half2(one(half_value(a & 0xffff), half_value(b & 0xffff), half_value(c & 0xffff)),
                    one(half_value(a >> 16), half_value(b >> 16), half_value(c >> 16)));
}
inline uint32_t mul_sub_half2(uint32_t a, uint32_t b, uint32_t c) { return fma_half2(a, b, c ^ 0x80008000u); }
inline float half_float(uint16_t bits) { return emulation::half_value(bits); }
inline uint16_t float_half(float x) { return emulation::half_bits(x); }
inline float divide_ieee(float a, float b) { return a / b; }
inline float round_half_even(float x) { return std::nearbyint(x); }
inline float min_float(float a, float b) { return std::fmin(a, b); }
inline float max_float(float a, float b) { return std::fmax(a, b); }
inline float abs_float(float x) { return std::fabs(x); }
inline float fma_float(float a, float b, float c) { return std::fma(a, b, c); }

inline Vec4 load_streamed(const void* p) {
  Vec4 v;
  std::memcpy(&v, __builtin_assume_aligned(p, 16), 16);
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) std::abort();
  return v;
}
template <typename T>
inline T load_coherent(const T* p) {
  return *p;
}
inline uint32_t load_streamed_word(const void* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}
inline Vec2 load_streamed_pair(const void* p) {
  Vec2 v;
  std::memcpy(&v, p, 8);
  return v;
}
inline void store_vector(void* p, const Vec4& v) { std::memcpy(p, &v, 16); }
inline uint32_t load_word(const void* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return x;
}
template <int N>
inline void load_floats(float (&x)[N], const float* p) {
  for (int i = 0; i < N; ++i) x[i] = p[i];
}
inline uint64_t load_flag(const uint64_t* p) { return *p; }
inline void store_flag(uint64_t* p, uint64_t v) { *p = v; }
inline uint32_t atomic_add(uint32_t* p, uint32_t v) {
  const uint32_t old = *p;
  *p += v;
  return old;
}
inline uint32_t atomic_add_release(uint32_t* p, uint32_t v) { return atomic_add(p, v); }
inline void prefetch_line(const void*) {}
inline void atomic_add64(uint64_t* p, uint64_t v) { *p += v; }
inline void fence_device() {}

template <int BYTES>
inline void copy_async(void* to, const void* from, uint32_t size = BYTES) {
  if (reinterpret_cast<uintptr_t>(to) % BYTES != 0 || reinterpret_cast<uintptr_t>(from) % BYTES != 0) std::abort();
  if (size != 0 && size != BYTES) std::abort();
  if (size) {
    std::memcpy(to, from, BYTES);
  } else {
    std::memset(to, 0, BYTES);
  }
}
inline void copy_async_commit() {}
template <int PENDING>
inline void copy_async_wait() {}

#if LOOPKV_BULK_COPY
// Low half of a barrier: bytes still to come, biased; high half: phases completed.
inline void barrier_init(uint64_t* barrier) { *barrier = 1u << 30; }
inline void barrier_init_done() {}
inline void fence_bulk_copy() {}
inline uint64_t stream_policy() { return 0; }
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) { *barrier += bytes; }
inline void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    std::abort();
  }
  std::memcpy(to, from, bytes);
  *barrier -= bytes;  // here a barrier must be told what to expect first
  if (static_cast<uint32_t>(*barrier) == 1u << 30) *barrier += 1ull << 32;
}
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while ((*barrier >> 32 & 1) == parity) emulation::yield();
}
#endif

}  // namespace loopkv
