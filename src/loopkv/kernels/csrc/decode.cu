// Launchers of the fused decode kernel for one head size and query tile count (-DLOOPKV_HEAD_DIM, _QUERY_TILES).
#include "decode.cuh"

#include <cuda_runtime.h>

#ifndef LOOPKV_WARPS
#define LOOPKV_WARPS 12
#endif
#ifndef LOOPKV_STAGES
#define LOOPKV_STAGES 3
#endif

namespace loopkv {

template <int BITS, bool PRECISION>
using Config = DecodeConfig<LOOPKV_HEAD_DIM, BITS, PRECISION, LOOPKV_QUERY_TILES, LOOPKV_WARPS, LOOPKV_STAGES>;

template <typename C>
__global__ void __launch_bounds__(C::WARPS * 32, 1) decode_kernel(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  decode_body<C>(args, shared);
}

template <typename C>
cudaError_t launch(const DecodeArgs& args, int blocks, cudaStream_t stream) {
  const int bytes = C::shared_bytes(args.rows);
  cudaError_t error = cudaFuncSetAttribute(decode_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  decode_kernel<C><<<blocks, C::WARPS * 32, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace loopkv

extern "C" {

// Attends one cell. `precision`: 1 reads the low value plane of hot tokens only. Returns a cudaError_t.
int loopkv_attend_decode(const loopkv::DecodeArgs* args, int precision, int blocks, void* stream) {
  using namespace loopkv;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  switch (args->cell.bits) {
    case 4:
      return precision ? launch<Config<4, true>>(*args, blocks, s) : launch<Config<4, false>>(*args, blocks, s);
    case 2:
      return launch<Config<2, false>>(*args, blocks, s);
    case 16:
      return launch<Config<16, false>>(*args, blocks, s);
    default:
      return cudaErrorInvalidValue;
  }
}

// Shared memory of the largest launch for so many rows: a bound on what a device must offer.
int loopkv_decode_shared_bytes(int rows) { return loopkv::Config<4, false>::shared_bytes(rows); }

const char* loopkv_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
}
