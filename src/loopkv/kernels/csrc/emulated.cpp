// The kernels compiled for a host: same arguments, same bytes, no GPU. Built by tests (g++), called through ctypes.
#include "attend.cuh"
#include "code.cuh"
#include "expand.cuh"
#include "scalar.cuh"

#ifndef LOOPKV_HEAD_DIM
#define LOOPKV_HEAD_DIM 128
#endif
#ifndef LOOPKV_QUERY_TILES
#define LOOPKV_QUERY_TILES 1
#endif
#ifndef LOOPKV_SINGLE
#define LOOPKV_SINGLE 0
#endif

namespace {

using namespace loopkv;

constexpr int kRing = 3 * 40 * LOOPKV_HEAD_DIM;
template <int BITS, bool PRECISION>
using Decode = AttendConfig<LOOPKV_HEAD_DIM, BITS, PRECISION, false, LOOPKV_QUERY_TILES, LOOPKV_SINGLE, 2, kRing>;
template <int BITS>
using Mixed = AttendConfig<LOOPKV_HEAD_DIM, BITS, false, true, 2, false, 2, kRing>;

template <typename Body>
void run(int shared_bytes, int blocks, int threads, Body body) {
  for (int id = 0; id < blocks; ++id) {
    std::vector<uint8_t> memory(shared_bytes + 128, 0xff);
    uint8_t* shared = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128) % 128;
    emulation::run_block(id, blocks, threads, [&] { body(shared); });
  }
}

template <typename C>
int attend(const AttendArgs& args, int blocks) {
  run(C::shared_bytes(C::MIXED ? args.max_tiles : args.rows), blocks, C::WARPS * 32,
      [&](uint8_t* shared) { attend_body<C>(args, shared); });
  return 0;
}

template <int TYPE>
int code(const CodeArgs& args, int blocks) {
  run(code_shared_bytes<LOOPKV_HEAD_DIM>(args.rows), blocks, kCodeWarps * 32,
      [&](uint8_t* shared) { code_body<LOOPKV_HEAD_DIM, TYPE>(args, shared); });
  return 0;
}

template <int BITS>
int expand(const ExpandArgs& args) {
  if constexpr (LOOPKV_HEAD_DIM % 128 == 0) {
    run(0, expand_blocks(args), kExpandWarps * 32, [&](uint8_t*) { expand_body<BITS, LOOPKV_HEAD_DIM>(args); });
    return 0;
  }
  return 1;
}

}  // namespace

extern "C" {

int loopkv_attend_decode(const AttendArgs* args, int precision, int blocks, void*) {
  switch (args->cell.bits) {
    case 4:
      return precision ? attend<Decode<4, true>>(*args, blocks) : attend<Decode<4, false>>(*args, blocks);
    case 2:
      return attend<Decode<2, false>>(*args, blocks);
    case 16:
      return attend<Decode<16, false>>(*args, blocks);
    default:
      return 1;
  }
}

int loopkv_attend_mixed(const AttendArgs* args, int blocks, void*) {
  switch (args->cell.bits) {
    case 4:
      return attend<Mixed<4>>(*args, blocks);
    case 2:
      return attend<Mixed<2>>(*args, blocks);
    case 16:
      return attend<Mixed<16>>(*args, blocks);
    default:
      return 1;
  }
}

int loopkv_attend_scalar(const AttendArgs* args, int precision, void*) {
  const int groups = args->max_tiles * args->geometry.kv_heads;
  run(scalar_shared_bytes(args->geometry.group_queries, LOOPKV_HEAD_DIM),
      groups * static_cast<int>(args->workspace.max_parts), kScalarThreads,
      [&](uint8_t* shared) { scalar_part<LOOPKV_HEAD_DIM>(*args, precision != 0, shared); });
  run(0, groups, kScalarThreads, [&](uint8_t*) { scalar_merge<LOOPKV_HEAD_DIM>(*args); });
  return 0;
}

int loopkv_code_pages(const CodeArgs* args, int blocks, void*) {
  switch (args->geometry.exact_type) {
    case kBfloat16:
      return code<kBfloat16>(*args, blocks);
    case kFloat16:
      return code<kFloat16>(*args, blocks);
    case kFloat32:
      return code<kFloat32>(*args, blocks);
    default:
      return 1;
  }
}

int loopkv_append(const AppendArgs* args, int queries, void*) {
  run(0, queries, 128, [&](uint8_t*) { append_body(*args); });
  return 0;
}

int loopkv_expand(const ExpandArgs* args, void*) {
  switch (args->cell.bits) {
    case 4:
      return expand<4>(*args);
    case 2:
      return expand<2>(*args);
    case 16:
      return expand<16>(*args);
    default:
      return 1;
  }
}

const char* loopkv_error_string(int) { return "invalid argument"; }
}
