// Launchers of the attention, coding and append kernels for one head size (-DLOOPKV_HEAD_DIM) and one width of query
// tiles in decode steps (-DLOOPKV_SINGLE=1: one query per kv head; else -DLOOPKV_QUERY_TILES tiles of 8).
#include "attend.cuh"
#include "code.cuh"
#include "expand.cuh"
#include "scalar.cuh"

#include <cuda_runtime.h>

#ifndef LOOPKV_WARPS
#define LOOPKV_WARPS 12
#endif
#ifndef LOOPKV_RING_BYTES
#define LOOPKV_RING_BYTES (3 * 40 * LOOPKV_HEAD_DIM)
#endif
#ifndef LOOPKV_WARPS_INT2
#define LOOPKV_WARPS_INT2 LOOPKV_WARPS
#define LOOPKV_RING_BYTES_INT2 LOOPKV_RING_BYTES
#endif
#ifndef LOOPKV_WARPS_PRECISION
#define LOOPKV_WARPS_PRECISION LOOPKV_WARPS
#define LOOPKV_RING_BYTES_PRECISION LOOPKV_RING_BYTES
#endif
#ifndef LOOPKV_WARPS_MIXED
#define LOOPKV_WARPS_MIXED 8
#endif
#ifndef LOOPKV_SINGLE
#define LOOPKV_SINGLE 0
#endif

namespace loopkv {

template <int BITS>
using Plain = AttendConfig<LOOPKV_HEAD_DIM, BITS, false, false, LOOPKV_QUERY_TILES, LOOPKV_SINGLE,
                           BITS == 2 ? LOOPKV_WARPS_INT2 : LOOPKV_WARPS,
                           BITS == 2 ? LOOPKV_RING_BYTES_INT2 : LOOPKV_RING_BYTES>;
using Precise = AttendConfig<LOOPKV_HEAD_DIM, 4, true, false, LOOPKV_QUERY_TILES, LOOPKV_SINGLE, LOOPKV_WARPS_PRECISION,
                             LOOPKV_RING_BYTES_PRECISION>;
template <int BITS>
using Mixed = AttendConfig<LOOPKV_HEAD_DIM, BITS, false, true, 2, false, LOOPKV_WARPS_MIXED, LOOPKV_RING_BYTES>;

template <typename C>
__global__ void __launch_bounds__(C::WARPS * 32, 1) attend_kernel(const __grid_constant__ AttendArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  attend_body<C>(args, shared);
}

template <typename C>
cudaError_t launch(const AttendArgs& args, int blocks, cudaStream_t stream) {
  const int bytes = C::shared_bytes(C::MIXED ? args.max_tiles : args.rows);
  cudaError_t error = cudaFuncSetAttribute(attend_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  attend_kernel<C><<<blocks, C::WARPS * 32, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <int TYPE>
__global__ void __launch_bounds__(kCodeWarps * 32) code_kernel(const __grid_constant__ CodeArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  code_body<LOOPKV_HEAD_DIM, TYPE>(args, shared);
}

__global__ void __launch_bounds__(kScalarThreads) scalar_part_kernel(const __grid_constant__ AttendArgs args,
                                                                     int precision) {
  extern __shared__ __align__(128) uint8_t shared[];
  scalar_part<LOOPKV_HEAD_DIM>(args, precision != 0, shared);
}

__global__ void scalar_merge_kernel(const __grid_constant__ AttendArgs args) { scalar_merge<LOOPKV_HEAD_DIM>(args); }

template <int BITS>
__global__ void __launch_bounds__(kExpandWarps * 32, 4) expand_kernel(const __grid_constant__ ExpandArgs args) {
  expand_body<BITS, LOOPKV_HEAD_DIM>(args);
}

template <int BITS>
cudaError_t launch_expand(const ExpandArgs& args, cudaStream_t stream) {
  if constexpr (LOOPKV_HEAD_DIM % 128 == 0) {
    expand_kernel<BITS><<<expand_blocks(args), kExpandWarps * 32, 0, stream>>>(args);
    return cudaGetLastError();
  } else {
    return cudaErrorInvalidValue;
  }
}

__global__ void append_kernel(const __grid_constant__ AppendArgs args) { append_body(args); }

template <int TYPE>
cudaError_t launch_code(const CodeArgs& args, int blocks, cudaStream_t stream) {
  const int bytes = code_shared_bytes<LOOPKV_HEAD_DIM>(args.rows);
  cudaError_t error = cudaFuncSetAttribute(code_kernel<TYPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  code_kernel<TYPE><<<blocks, kCodeWarps * 32, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace loopkv

extern "C" {

using loopkv::AppendArgs;
using loopkv::AttendArgs;
using loopkv::CodeArgs;
using loopkv::ExpandArgs;

// One cell of a decode step. `precision`: 1 reads the low value plane of hot tokens only. Returns a cudaError_t.
int loopkv_attend_decode(const AttendArgs* args, int precision, int blocks, void* stream) {
  using namespace loopkv;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (args->cell.bits) {
    case 4:
      return precision ? launch<Precise>(*args, blocks, s) : launch<Plain<4>>(*args, blocks, s);
    case 2:
      return launch<Plain<2>>(*args, blocks, s);
    case 16:
      return launch<Plain<16>>(*args, blocks, s);
    default:
      return cudaErrorInvalidValue;
  }
}

// One cell of a step with several new tokens per row: tiles first_tile .. first_tile + max_tiles - 1.
int loopkv_attend_mixed(const AttendArgs* args, int blocks, void* stream) {
  using namespace loopkv;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (args->cell.bits) {
    case 4:
      return launch<Mixed<4>>(*args, blocks, s);
    case 2:
      return launch<Mixed<2>>(*args, blocks, s);
    case 16:
      return launch<Mixed<16>>(*args, blocks, s);
    default:
      return cudaErrorInvalidValue;
  }
}

// One cell in fp32 arithmetic and any dtype, two launches: queries first_tile .. first_tile + max_tiles - 1.
int loopkv_attend_scalar(const AttendArgs* args, int precision, void* stream) {
  using namespace loopkv;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int groups = args->max_tiles * args->geometry.kv_heads;
  scalar_part_kernel<<<groups * static_cast<int>(args->workspace.max_parts), kScalarThreads,
                       scalar_shared_bytes(args->geometry.group_queries, LOOPKV_HEAD_DIM), s>>>(*args, precision);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  scalar_merge_kernel<<<groups, kScalarThreads, 0, s>>>(*args);
  return cudaGetLastError();
}

int loopkv_code_pages(const CodeArgs* args, int blocks, void* stream) {
  using namespace loopkv;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (args->geometry.exact_type) {
    case kBfloat16:
      return launch_code<kBfloat16>(*args, blocks, s);
    case kFloat16:
      return launch_code<kFloat16>(*args, blocks, s);
    case kFloat32:
      return launch_code<kFloat32>(*args, blocks, s);
    default:
      return cudaErrorInvalidValue;
  }
}

int loopkv_append(const AppendArgs* args, int queries, void* stream) {
  loopkv::append_kernel<<<queries, 128, 0, static_cast<cudaStream_t>(stream)>>>(*args);
  return cudaGetLastError();
}

// Head sizes that are multiples of 128.
int loopkv_expand(const ExpandArgs* args, void* stream) {
  using namespace loopkv;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (args->cell.bits) {
    case 4:
      return launch_expand<4>(*args, s);
    case 2:
      return launch_expand<2>(*args, s);
    case 16:
      return launch_expand<16>(*args, s);
    default:
      return cudaErrorInvalidValue;
  }
}

const char* loopkv_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
}
