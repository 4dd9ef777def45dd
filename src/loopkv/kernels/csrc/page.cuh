// Where everything lies in one head's part of a coded page (codec/pages.py), for all that write and read one. Attention
// reads it in halves (halves.cuh) or in integers (integers.cuh).
#pragma once

#include "simt.cuh"

namespace loopkv {

constexpr int kPageTokens = 32;

constexpr int largest_block(int channels) { return channels >= 128 ? 128 : channels >= 64 ? 64 : 32; }

// Channel block number `index` of a head of D channels: 128 as often as it fits, then 64, then 32.
constexpr int block_channels(int D, int index) {
  return index == 0 ? largest_block(D) : block_channels(D - largest_block(D), index - 1);
}
constexpr int block_start(int D, int index) {
  return index == 0 ? 0 : block_start(D, index - 1) + block_channels(D, index - 1);
}
constexpr int block_number(int D) { return D == 0 ? 0 : 1 + block_number(D - largest_block(D)); }

// Byte offsets in one head's part of a page.
template <int D, int BITS>
struct HeadPage {
  static constexpr int kKeyScales = kPageTokens * D * BITS / 8;
  static constexpr int kKeyZeros = kKeyScales + 2 * D;
  static constexpr int kValueScales = kKeyZeros + 2 * D;
  static constexpr int kValueZeros = kValueScales + 2 * D;
  static constexpr int kValueCodes = kValueZeros + 2 * D;
  static constexpr int kMainBytes = kValueCodes + kPageTokens * D / 4;  // all that is always read
  static constexpr int kLowBytes = BITS == 4 ? kPageTokens * D / 4 : 0;
  static constexpr int kBytes = kMainBytes + kLowBytes;
  static constexpr int kTokenPlaneBytes = D / 4;  // one token in a 2-bit plane
};

// Slot of a token in the low value plane: of eight neighbours, those of even number first.
LKV_DEVICE int value_slot(int token) { return (token & ~7) | ((token & 1) << 2) | ((token >> 1) & 3); }
LKV_DEVICE uint32_t slot_token(uint32_t slot) { return (slot & ~7) | ((slot & 3) << 1) | ((slot >> 2) & 1); }

// BYTES bytes of shared memory as words (2 bytes: spread over the two halves of one).
template <int BYTES>
LKV_DEVICE void load_words(uint32_t* out, const uint8_t* p) {
  if constexpr (BYTES >= 16) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const Vec4 v = reinterpret_cast<const Vec4*>(p)[i];
      out[4 * i] = v.x;
      out[4 * i + 1] = v.y;
      out[4 * i + 2] = v.z;
      out[4 * i + 3] = v.w;
    }
  } else if constexpr (BYTES == 8) {
    const Vec2 v = *reinterpret_cast<const Vec2*>(p);
    out[0] = v.x;
    out[1] = v.y;
  } else if constexpr (BYTES == 4) {
    out[0] = *reinterpret_cast<const uint32_t*>(p);
  } else {
    static_assert(BYTES == 2);
    const uint32_t x = *reinterpret_cast<const uint16_t*>(p);
    out[0] = (x | (x << 8)) & 0x00ff00ffu;
  }
}

}  // namespace loopkv
