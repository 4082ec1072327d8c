// The products of gemm_3xtf32.cu by a warpgroup's instructions, wgmma, which GPUs of compute capability 9.0 alone have. Two
// warpgroups share a tile of the result, 64 rows each. Their rows of a come from registers; columns of b from shared memory, in two
// copies, of first and of second parts, which the block makes of a tile while it multiplies the one before.
//
// A sum of 16 terms takes six instructions, which run by themselves: while one warpgroup adds such a sum to its result, those of the
// other do. Products of second parts come first, so that what is cut off of them is small.
#include "halftone/cuda/gemm_3xtf32.cuh"

namespace halftone {
namespace cuda {
namespace {

using namespace gemm;

constexpr int depth = 32, stages = 3;  // of k in a tile, and tiles under way
constexpr int threads = 256;
constexpr int term = 16;  // of k, that tensor cores sum up

template <bool a_along, bool b_along, bool windows, bool narrow> struct Tiling {
  static constexpr int columns = tile_columns(narrow);
  using A = std::conditional_t<a_along, AlongK<tile_rows, depth, threads, 8, windows>, AcrossK<tile_rows, depth, threads, windows>>;
  using B = std::conditional_t<b_along, AlongK<columns, depth, threads, 4, false>, AcrossK<columns, depth, threads, false>>;
  static constexpr int stage = A::size + B::size, parts = columns * depth;  // of b: as many numbers of first parts, and of second
  static constexpr size_t shared = stages * (stage + 2 * parts) * sizeof(float);
};

// ---- b in shared memory (PTX ISA: "Asynchronous Warpgroup Level Matrix Shared Memory Layout", without swizzle): blocks of 8 columns
// by 4 numbers of k, 16 bytes for each column; first all columns of 4 numbers, then those of the next.

constexpr int k_block = 4;
template <int columns> __device__ uint64_t descriptor(const float* first) {
  constexpr uint64_t next_k = columns * k_block * sizeof(float) / 16, next_columns = 8 * k_block * sizeof(float) / 16;
  return (shared_address(first) & 0x3ffffu) >> 4 | next_k << 16 | next_columns << 32;
}

// Both parts of a tile of b. Of 8 numbers of k the even ones come first, as a thread has them of a.
template <class T, bool first_parts> __device__ void split_columns(float* to, const float* tile) {
#pragma unroll
  for (int i = 0; i < T::columns * depth / 8 / threads; ++i) {
    const int unit = static_cast<int>(threadIdx.x) + i * threads, column = unit % T::columns, eight = unit / T::columns;
    Split<8> s;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto v = T::B::template numbers<4>(tile, column, eight * 8 + h * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) s.template set<first_parts>(j % 2 * 4 + h * 2 + j / 2, v.v[j]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      auto* at = reinterpret_cast<uint32_t*>(to + ((eight * 2 + h) * T::columns + column) * k_block);
      store_pack(at, Pack<uint32_t, 4>{s.high[h * 4], s.high[h * 4 + 1], s.high[h * 4 + 2], s.high[h * 4 + 3]});
      if constexpr (!first_parts) store_pack(at + T::parts, Pack<uint32_t, 4>{s.low[h * 4], s.low[h * 4 + 1], s.low[h * 4 + 2], s.low[h * 4 + 3]});
    }
  }
}

// ---- instructions

// sum = a b, plus itself where it `adds`, for 64 rows and 64 or 128 columns. A thread's numbers of a sum: (g, 2 t), (g, 2 t + 1),
// (g + 8, 2 t) and (g + 8, 2 t + 1) of each 8 columns.
template <bool adds> __device__ void multiply(float (&sum)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
      "%28, %29, %30, %31}, {%32, %33, %34, %35}, %36, %37, 1, 1;"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]), "+f"(sum[8]), "+f"(sum[9]),
        "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]), "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]),
        "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]), "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]),
        "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(adds ? 1 : 0));
}
template <bool adds> __device__ void multiply(float (&sum)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
      "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "
      "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, %69, 1, 1;"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]), "+f"(sum[8]), "+f"(sum[9]),
        "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]), "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]),
        "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]), "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]),
        "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31]), "+f"(sum[32]), "+f"(sum[33]), "+f"(sum[34]), "+f"(sum[35]), "+f"(sum[36]),
        "+f"(sum[37]), "+f"(sum[38]), "+f"(sum[39]), "+f"(sum[40]), "+f"(sum[41]), "+f"(sum[42]), "+f"(sum[43]), "+f"(sum[44]), "+f"(sum[45]),
        "+f"(sum[46]), "+f"(sum[47]), "+f"(sum[48]), "+f"(sum[49]), "+f"(sum[50]), "+f"(sum[51]), "+f"(sum[52]), "+f"(sum[53]), "+f"(sum[54]),
        "+f"(sum[55]), "+f"(sum[56]), "+f"(sum[57]), "+f"(sum[58]), "+f"(sum[59]), "+f"(sum[60]), "+f"(sum[61]), "+f"(sum[62]), "+f"(sum[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(adds ? 1 : 0));
}
__device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int n> __device__ void wait_for_products(float (&sum)[n]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}
// What threads wrote into shared memory is there for products after the block's next barrier.
__device__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- the kernel

template <class T> __global__ void __launch_bounds__(threads, 1) gemm_wgmma_kernel(const Product p) {
  wait_for_previous();
  extern __shared__ __align__(128) float memory[];
  using A = typename T::A;
  using B = typename T::B;
  const Place at(p, tile_rows, T::columns);
  const A a(p.a, p.windows, p.a.data + at.batch * p.a.step, at.row);
  const B b(p.b, p.windows, p.b.data + at.batch * p.b.step, at.column);
  const int first = at.part * p.split * depth, steps = min((p.k - first + depth - 1) / depth, p.split);
  const int lane = static_cast<int>(threadIdx.x) % warp_size, row = static_cast<int>(threadIdx.x) / warp_size * 16 + lane / 4;
  float* const parts = memory;  // of b, as multiples of 128 bytes
  float* const tiles = memory + stages * 2 * T::parts;

  auto load = [&](int step) {
    float* tile = tiles + step % stages * T::stage;
    if (step < steps) {
      a.load(tile, first + step * depth);
      b.load(tile + A::size, first + step * depth);
    }
    end_copies();
  };
  auto split = [&]<bool first_parts>(int step) {
    if (step < steps) split_columns<T, first_parts>(parts + step % stages * 2 * T::parts, tiles + step % stages * T::stage + A::size);
  };

  constexpr int numbers = T::columns / 2;  // a thread's, of the result
  float sums[numbers];
  auto sum_up = [&]<bool first_parts>(std::bool_constant<first_parts>) {
#pragma unroll
    for (int i = 0; i < numbers; ++i) sums[i] = 0;
    load(0);
    load(1);
    wait_for_copies<1>();
    __syncthreads();
    split.template operator()<first_parts>(0);
    publish();
    Split<4> next[term / 8];  // of a's rows
    auto fetch = [&](const float* tile, int k) {
#pragma unroll
      for (int e = 0; e < term / 8; ++e)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // The order of k is free: what the instruction calls t and t + 4 are 2 t and 2 t + 1 here.
          const auto v = A::template numbers<2>(tile, row + h * 8, k + e * 8 + lane % 4 * 2);
          next[e].template set<first_parts>(h, v.v[0]);
          next[e].template set<first_parts>(h + 2, v.v[1]);
        }
    };
    fetch(tiles, 0);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for_copies<0>();
      __syncthreads();
      load(step + 2);
      const float *tile = tiles + step % stages * T::stage, *part = parts + step % stages * 2 * T::parts;
#pragma unroll
      for (int k = 0; k < depth; k += term) {
        Split<4> s[term / 8];
#pragma unroll
        for (int e = 0; e < term / 8; ++e) s[e] = next[e];
        auto columns = [&](int e, int second) { return descriptor<T::columns>(part + (k + e * 8) * T::columns + second * T::parts); };
        float sum[numbers];
        begin_products();
        if constexpr (!first_parts) {
#pragma unroll
          for (int e = 0; e < term / 8; ++e) {
            if (e == 0) multiply<false>(sum, s[e].low, columns(e, 0));
            else multiply<true>(sum, s[e].low, columns(e, 0));
            multiply<true>(sum, s[e].high, columns(e, 1));
          }
        }
#pragma unroll
        for (int e = 0; e < term / 8; ++e) {
          if (first_parts && e == 0) multiply<false>(sum, s[e].high, columns(e, 0));
          else multiply<true>(sum, s[e].high, columns(e, 0));
        }
        end_products();
        if (k == 0) split.template operator()<first_parts>(step + 1);
        const bool last = k + term == depth;
        fetch(last ? tiles + (step + 1) % stages * T::stage : tile, last ? 0 : k + term);
        wait_for_products(sum);
#pragma unroll
        for (int i = 0; i < numbers; ++i) sums[i] += sum[i];
      }
      publish();
    }
  };
  auto store = [&](uint64_t wanted) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (at.row + row + r * 8 >= p.m) continue;
      float* to = row_of(p, at, at.row + row + r * 8);
#pragma unroll
      for (int i = r * 2; i < numbers; i += 4) store_pair(p, to, at.column + i / 4 * 8 + lane % 4 * 2, sums[i], sums[i + 1], wanted >> i);
    }
  };

  sum_up(std::false_type());
  uint64_t not_finite = 0;
#pragma unroll
  for (int i = 0; i < numbers; ++i) if (!::isfinite(sums[i])) not_finite |= uint64_t{1} << i;
  store(~uint64_t{0});
  if (!__syncthreads_or(not_finite != 0)) return;
  sum_up(std::true_type());
  store(not_finite);
}

const Kernels kernels{depth, 1, [](const Form& form, const Product& p, int64_t blocks) {
                        visit_form(form, [&]<bool a_along, bool b_along, bool windows, bool narrow>() {
                          using T = Tiling<a_along, b_along, windows, narrow>;
                          launch("gemm_3xtf32", gemm_wgmma_kernel<T>, Grid{blocks, threads, T::shared}, p);
                        });
                      }};

}  // namespace
}  // namespace cuda

void register_wgmma();
void register_wgmma() { cuda::gemm::by_wgmma = &cuda::kernels; }

}  // namespace halftone
