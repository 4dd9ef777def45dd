// The machine as the kernels see it: one name per operation. On a GPU each is an instruction or two; compiled for a
// host (emulate.h) the same kernels run lane by lane on a CPU, which is how their logic is tested without a GPU.
#pragma once

#include <stdint.h>

#if !defined(__CUDACC__)
#include "emulate.h"
#else

#define LKV_DEVICE __device__ __forceinline__
#define LKV_NOINLINE __device__ __noinline__

#ifndef LOOPKV_BULK_COPY
#define LOOPKV_BULK_COPY 1  // sm_90 and later; 0: 16-byte asynchronous copies by all lanes
#endif

namespace loopkv {

struct alignas(16) Vec4 {
  uint32_t x, y, z, w;
};
struct alignas(8) Vec2 {
  uint32_t x, y;
};

LKV_DEVICE int lane_id() { return static_cast<int>(threadIdx.x & 31); }
// The same number, of which the compiler forgets what it knows: what is made of it inside a loop is made anew in every
// turn instead of being kept in registers.
LKV_DEVICE int forget(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
LKV_DEVICE int thread_id() { return static_cast<int>(threadIdx.x); }
LKV_DEVICE int block_threads() { return static_cast<int>(blockDim.x); }
LKV_DEVICE int block_id() { return static_cast<int>(blockIdx.x); }
LKV_DEVICE int block_count() { return static_cast<int>(gridDim.x); }
LKV_DEVICE void sync_block() { __syncthreads(); }
LKV_DEVICE void sync_warp() { __syncwarp(); }
LKV_DEVICE void spin_pause() {}
LKV_DEVICE int64_t clock_cycles() { return clock64(); }

template <typename T>
LKV_DEVICE T shfl(T value, int source) {
  return __shfl_sync(0xffffffffu, value, source);
}
template <typename T>
LKV_DEVICE T shfl_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <typename T>
LKV_DEVICE T shfl_up(T value, int delta) {
  return __shfl_up_sync(0xffffffffu, value, delta);
}
LKV_DEVICE uint32_t ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
LKV_DEVICE bool any(bool predicate) { return __any_sync(0xffffffffu, predicate); }
LKV_DEVICE bool any_in_block(bool predicate) { return __syncthreads_or(predicate); }
LKV_DEVICE uint32_t warp_max(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }
LKV_DEVICE int warp_max(int x) { return __reduce_max_sync(0xffffffffu, x); }
LKV_DEVICE int popcount(uint32_t bits) { return __popc(bits); }
LKV_DEVICE uint32_t rotate_left(uint32_t x, int by) { return __funnelshift_l(x, x, by); }

LKV_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
LKV_DEVICE float bits_float(uint32_t bits) { return __uint_as_float(bits); }
LKV_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }

// The bits of a under MASK, of b elsewhere.
template <uint32_t MASK>
LKV_DEVICE uint32_t select_bits(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(d) : "r"(a), "r"(b), "n"(MASK));
  return d;
}

// Bytes of {b, a} (b the higher four) chosen by the nibbles of selector, the lowest first.
template <uint32_t SELECTOR>
LKV_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, SELECTOR);
}
LKV_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

// c[16 x 8] += a[16 x 16] b[16 x 8], fp32 sums; subnormal halves count in full.
LKV_DEVICE void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
LKV_DEVICE void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// c[16 x 8] += a[16 x 32] b[32 x 8] in integers: a's bytes unsigned, b's unsigned or signed.
LKV_DEVICE void mma_u8u8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
LKV_DEVICE void mma_u8s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Transpose of an 8 x 8 matrix of 16-bit values; lane 4 i + j holds row i, columns 2 j and 2 j + 1.
LKV_DEVICE uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Four 8 x 8 matrices of 16-bit values from shared memory: lane 8 i + j gives the address of row j of matrix i, lane
// 4 r + t gets row r, columns 2 t and 2 t + 1 of each (TRANSPOSED: column r, rows 2 t and 2 t + 1).
template <bool TRANSPOSED>
LKV_DEVICE Vec4 load_matrices(const void* row) {
  Vec4 v;
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
  }
  return v;
}

LKV_DEVICE uint32_t pack_half2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
LKV_DEVICE uint32_t pack_bfloat2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
LKV_DEVICE uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
LKV_DEVICE uint32_t mul_sub_half2(uint32_t a, uint32_t b, uint32_t c) {  // a b - c
  uint32_t d;
  asm("{.reg .b32 n; neg.f16x2 n, %3; fma.rn.f16x2 %0, %1, %2, n;}" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
LKV_DEVICE uint32_t mul_half2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
LKV_DEVICE float half_float(uint16_t bits) {
  float x;
  asm("{.reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "h"(bits));
  return x;
}
LKV_DEVICE uint16_t float_half(float x) {
  uint16_t d;
  asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h;}" : "=h"(d) : "f"(x));
  return d;
}
LKV_DEVICE float divide_ieee(float a, float b) { return __fdiv_rn(a, b); }
LKV_DEVICE float round_half_even(float x) { return rintf(x); }
LKV_DEVICE float min_float(float a, float b) { return fminf(a, b); }
LKV_DEVICE float max_float(float a, float b) { return fmaxf(a, b); }
LKV_DEVICE float abs_float(float x) { return fabsf(x); }
LKV_DEVICE float fma_float(float a, float b, float c) { return fmaf(a, b, c); }

// Global memory. Streamed data is read once: no place in L1.
LKV_DEVICE Vec4 load_streamed(const void* p) {
  Vec4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
LKV_DEVICE uint32_t load_streamed_word(const void* p) {
  uint32_t v;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
LKV_DEVICE Vec2 load_streamed_pair(const void* p) {
  Vec2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
LKV_DEVICE void store_vector(void* p, const Vec4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
template <typename T>
LKV_DEVICE T load_coherent(const T* p) {  // past L1: other blocks of this launch wrote it
  return __ldcg(p);
}
LKV_DEVICE uint32_t load_word(const void* p) { return __ldg(static_cast<const uint32_t*>(p)); }
template <int N>
LKV_DEVICE void load_floats(float (&x)[N], const float* p) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(p) + i);
      x[4 * i] = v.x;
      x[4 * i + 1] = v.y;
      x[4 * i + 2] = v.z;
      x[4 * i + 3] = v.w;
    }
  } else if constexpr (N == 2) {
    const float2 v = __ldcg(reinterpret_cast<const float2*>(p));
    x[0] = v.x;
    x[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = __ldcg(p + i);
  }
}
LKV_DEVICE uint64_t load_flag(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
LKV_DEVICE void store_flag(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
LKV_DEVICE uint32_t atomic_add(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }
// What this warp stored before (and synchronised) is seen by whoever sees the sum.
LKV_DEVICE uint32_t atomic_add_release(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
LKV_DEVICE void prefetch_line(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
LKV_DEVICE void atomic_add64(uint64_t* p, uint64_t v) {
  atomicAdd(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(v));
}
// After an atomic operation: what others released before it is seen by this lane, and after sync_warp by its warp.
LKV_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

LKV_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Asynchronous copy of 16 or 8 bytes; with size 0 the destination is zeroed and nothing is read.
template <int BYTES>
LKV_DEVICE void copy_async(void* to_shared, const void* from_global, uint32_t size = BYTES) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from_global),
                 "r"(size)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to_shared)), "l"(from_global),
                 "r"(size)
                 : "memory");
  }
}
LKV_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
LKV_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#if LOOPKV_BULK_COPY
// Bulk copies that complete on a barrier, which expects so many bytes in all.
LKV_DEVICE void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
LKV_DEVICE void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Before a bulk copy overwrites what this thread stored itself.
LKV_DEVICE void fence_bulk_copy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
LKV_DEVICE void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// What createpolicy.fractional.L2::evict_first makes for all of the data; a constant takes no instructions.
LKV_DEVICE uint64_t stream_policy() { return 0x12f0000000000000u; }
LKV_DEVICE void bulk_copy(void* to_shared, const void* from_global, uint32_t bytes, uint64_t* barrier,
                          uint64_t policy) {
  const uint32_t bar = shared_address(barrier);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to_shared)),
      "l"(from_global), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}
LKV_DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
  const uint32_t bar = shared_address(barrier);
  uint32_t done;
  do {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
  } while (!done);
}
#endif

}  // namespace loopkv
#endif
