// The kernels compiled for a host: same arguments, same bytes, no GPU. Built by tests (g++), called through ctypes.
#include "decode.cuh"

#ifndef LOOPKV_HEAD_DIM
#define LOOPKV_HEAD_DIM 128
#endif
#ifndef LOOPKV_QUERY_TILES
#define LOOPKV_QUERY_TILES 1
#endif

namespace {

using namespace loopkv;

template <typename C>
void run_decode(const DecodeArgs& args, int blocks) {
  for (int id = 0; id < blocks; ++id) {
    std::vector<uint8_t> memory(C::shared_bytes(args.rows) + 128, 0xff);
    uint8_t* shared = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128) % 128;
    emulation::run_block(id, blocks, C::WARPS * 32, [&] { decode_body<C>(args, shared); });
  }
}

template <int BITS, bool PRECISION>
using Config = DecodeConfig<LOOPKV_HEAD_DIM, BITS, PRECISION, LOOPKV_QUERY_TILES, 2, 3>;

}  // namespace

extern "C" int loopkv_attend_decode(const loopkv::DecodeArgs* args, int precision, int blocks, void*) {
  switch (args->cell.bits) {
    case 4:
      if (precision) {
        run_decode<Config<4, true>>(*args, blocks);
      } else {
        run_decode<Config<4, false>>(*args, blocks);
      }
      return 0;
    case 2:
      run_decode<Config<2, false>>(*args, blocks);
      return 0;
    case 16:
      run_decode<Config<16, false>>(*args, blocks);
      return 0;
    default:
      return 1;
  }
}

extern "C" int loopkv_decode_shared_bytes(int rows) { return Config<4, false>::shared_bytes(rows); }
extern "C" const char* loopkv_error_string(int) { return "invalid argument"; }
