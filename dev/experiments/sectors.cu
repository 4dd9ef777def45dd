// How many bytes does HBM move for scattered 32-byte reads? Reads a share of the sectors of a large buffer, chosen
// sector by sector or in pairs, and compares the time with reading everything. Prints one line per case.
#include <cstdio>
#include <cstdint>
#include <vector>
#include <algorithm>
#include <cuda_runtime.h>

__device__ __forceinline__ uint32_t mix(uint32_t x) {
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
  return x;
}
// Each lane pair reads 32-byte units: 16 bytes a lane. `unit_sectors` sectors are chosen together.
template <int UNROLL>
__global__ void read_sectors(const uint4* data, size_t sectors, uint32_t threshold, int unit_shift, uint32_t* sink) {
  size_t pair = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) / 2, pairs = (size_t)gridDim.x * blockDim.x / 2;
  uint32_t acc = 0;
  for (size_t base = pair; base < sectors; base += pairs * UNROLL) {
    uint4 v[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      size_t s = base + i * pairs;
      v[i] = make_uint4(0, 0, 0, 0);
      if (s < sectors && mix((uint32_t)(s >> unit_shift)) <= threshold)
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w) : "l"(data + 2 * s + (threadIdx.x & 1)));
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) acc ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  if (acc == 0x12345678) *sink = acc;
}
int main() {
  const size_t bytes = 4ull << 30, sectors = bytes / 32;
  uint4* data; uint32_t* sink;
  cudaMalloc(&data, bytes); cudaMalloc(&sink, 4);
  std::vector<uint32_t> host(1 << 20); for (size_t i = 0; i < host.size(); ++i) host[i] = i * 2654435761u;
  for (size_t o = 0; o < bytes; o += 4 * host.size()) cudaMemcpy((char*)data + o, host.data(), 4 * host.size(), cudaMemcpyHostToDevice);
  cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
  for (int granularity : {0, 32}) {
    if (granularity) cudaDeviceSetLimit(cudaLimitMaxL2FetchGranularity, granularity);
    size_t now; cudaDeviceGetLimit(&now, cudaLimitMaxL2FetchGranularity);
    for (int shift : {0, 1, 2})
      for (double share : {1.0, 0.5, 0.36, 0.2, 0.1}) {
        uint32_t threshold = share >= 1 ? 0xffffffffu : (uint32_t)(share * 4294967295.0);
        std::vector<float> t;
        for (int i = 0; i < 7; ++i) {
          cudaEventRecord(a);
          read_sectors<8><<<132 * 8, 256>>>(data, sectors, threshold, shift, sink);
          cudaEventRecord(b); cudaEventSynchronize(b);
          float ms; cudaEventElapsedTime(&ms, a, b); t.push_back(ms);
        }
        std::sort(t.begin(), t.end());
        printf("sectors: fetch limit %zu, unit %3d B, share %.2f: %.3f ms, %.0f GB/s of chosen bytes\n", now, 32 << shift, share, t[3], share * bytes / t[3] * 1e-6);
      }
  }
  printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
