"""Functions in CUDA that the kernels call."""

ADDITIONS = r"""
// Adds 16 columns of eight rows of a wgmma accumulator, 16 bytes a lane. A lane holds columns
// 2h, 2h + 1 of two blocks of eight; it swaps one pair with its neighbour.
template <bool ALL>
static __device__ __forceinline__ void add_block(float *to, int row, float left0, float left1,
                                                 float right0, float right1) {
  const int lane = threadIdx.x & 31, odd = lane & 1;
  const float taken0 = __shfl_xor_sync(0xffffffffu, odd ? left0 : right0, 1);
  const float taken1 = __shfl_xor_sync(0xffffffffu, odd ? left1 : right1, 1);
  const float a = odd ? taken0 : left0, b = odd ? taken1 : left1;
  const float c = odd ? right0 : taken0, d = odd ? right1 : taken1;
  to += odd * 8 + (lane & 2) * 2;
  if (!ALL && row < 0)
    return;
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}
// Takes the accumulator register by register; k is the register's number modulo 8. Rows below 0
// are left out unless ALL says that there are none. 64-bit offsets.
template <bool ALL>
static __device__ __forceinline__ void add_quads(float *held, int k, float value, float *out,
                                                 int row, int columns, int column) {
  held[k] = value;
  float *to = out + (long long)row * columns + column;
  if (k == 5)
    add_block<ALL>(to, row, held[0], held[1], held[4], held[5]);
  if (k == 7)
    add_block<ALL>(to, row, held[2], held[3], held[6], held[7]);
}
// Adds 32 columns of eight rows. Lanes of an even row and of the odd one after it exchange halves,
// so that eight lanes add 128 neighbouring bytes of one row. A lane's numbers are 0, 1, 4, 5, 8, 9,
// 12 and 13 of held.
template <bool ALL>
static __device__ __forceinline__ void add_line(const float *held, float *even_to, int even,
                                                float *odd_to, int odd) {
  const bool upper = threadIdx.x & 4;
  float e[4], o[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float left = held[k / 2 * 4 + k % 2], right = held[k / 2 * 4 + k % 2 + 8];
    const float taken = __shfl_xor_sync(0xffffffffu, upper ? left : right, 4);
    e[k] = upper ? taken : left;
    o[k] = upper ? right : taken;
  }
  add_block<ALL>(even_to + upper * 16, even, e[0], e[1], e[2], e[3]);
  add_block<ALL>(odd_to + upper * 16, odd, o[0], o[1], o[2], o[3]);
}
// As add_quads, to the even and the odd row of two neighbours; k counts modulo 16.
template <bool ALL>
static __device__ __forceinline__ void add_lines(float *held, int k, float value, float *out,
                                                 int even, int odd, int columns, int column) {
  held[k] = value;
  float *even_to = out + (long long)even * columns + column;
  float *odd_to = out + (long long)odd * columns + column;
  if (k == 13)
    add_line<ALL>(held, even_to, even, odd_to, odd);
  if (k == 15)
    add_line<ALL>(held + 2, even_to, even, odd_to, odd);
}
"""

IN_PHASE = r"""
// A clock that all blocks of a launch advance: a block's whole walk is PHASE ticks, whatever its
// number of tiles. With as many blocks as always run at a time, ticks / running is how far the
// average block has come. The sum may wrap around: blocks begin elsewhere then, once.
static constexpr unsigned PHASE = 1u << 12;

// The tile, of so many, at which a block begins that starts now.
static __device__ __forceinline__ int first_tile(int *clock, int tiles, int running) {
  // Not a load, which could find an old value in the cache of its multiprocessor.
  const unsigned ticks = atomicAdd(reinterpret_cast<unsigned *>(clock), 0u);
  return ticks / running % PHASE * tiles / PHASE;
}

static __device__ __forceinline__ void tick(int *clock, int tiles) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(clock), "r"(PHASE / tiles)
               : "memory");
}
"""
