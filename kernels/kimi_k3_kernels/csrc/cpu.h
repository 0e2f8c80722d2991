// What every CPU kernel shares: the instruction set in use, threads, dtypes, and the way back to the reference.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>
#include <optional>
#include <string>
#include <vector>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KIMI_K3_X86 1
#include <immintrin.h>
// No -march=native: each function names what it needs, so one binary runs everywhere.
#define KIMI_K3_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2")))
#define KIMI_K3_AVX512_INT8 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx512vbmi,fma,avx2")))
#define KIMI_K3_AVX2 __attribute__((target("avx2,fma")))
#else
#define KIMI_K3_X86 0
#endif

namespace kimi_k3 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using bfloat16 = uint16_t;  // its bits

enum class Isa : int { generic = 0, avx2 = 1, avx512 = 2 };

// The best that this machine has, unless `set_cpu_instructions` chose a lower one (for tests).
Isa active_isa();

// Whether this machine also has what KIMI_K3_AVX512_INT8 names beyond KIMI_K3_AVX512: one kernel asks for it.
bool has_int8_dot();

inline float to_float(bfloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline bfloat16 to_bfloat16(float value) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<bfloat16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float load(const float* x) { return *x; }
inline float load(const bfloat16* x) { return to_float(*x); }
inline void store(float* x, float value) { *x = value; }
inline void store(bfloat16* x, float value) { *x = to_bfloat16(value); }

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Scratch on a cache line's boundary: where malloc puts it, every second vector load would cross two lines.
template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{64}); }
  template <class U>
  bool operator==(const LineAllocator<U>&) const { return true; }
  template <class U>
  bool operator!=(const LineAllocator<U>&) const { return false; }
};
template <class T>
using LineVector = std::vector<T, LineAllocator<T>>;

inline bool is_contiguous(const Tensor& t) {
  int64_t expected = 1;
  for (int64_t dim = t.dim() - 1; dim >= 0; --dim) {
    if (t.size(dim) != 1 && t.stride(dim) != expected) return false;
    expected *= t.size(dim);
  }
  return true;
}

inline Tensor make_contiguous(const Tensor& t) { return is_contiguous(t) ? t : torch::stable::contiguous(t); }

// Float32 or bfloat16, what most kernels read.
inline bool is_narrow(const Tensor& t) {
  return t.scalar_type() == ScalarType::BFloat16 || t.scalar_type() == ScalarType::Float;
}

// The first `count` values of a narrow tensor as floats.
inline std::vector<float> floats_of(const Tensor& t, int64_t count) {
  std::vector<float> out(count);
  const Tensor plain = make_contiguous(t);
  if (t.scalar_type() == ScalarType::Float)
    std::copy_n(data<float>(plain), count, out.begin());
  else
    std::transform(data<bfloat16>(plain), data<bfloat16>(plain) + count, out.begin(), [](bfloat16 x) { return to_float(x); });
  return out;
}

inline Tensor new_tensor(const Tensor& like, std::vector<int64_t> sizes, std::optional<ScalarType> dtype = std::nullopt) {
  return torch::stable::new_empty(like, sizes, dtype);
}

// Integers of either width, read as int64.
struct Integers {
  explicit Integers(const Tensor& t)
      : tensor(make_contiguous(t)), values(tensor.const_data_ptr()), wide(t.scalar_type() == ScalarType::Long) {
    STD_TORCH_CHECK(wide || t.scalar_type() == ScalarType::Int, "kimi_k3: want int32 or int64 indices");
  }
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
  }
  Tensor tensor;
  const void* values;
  bool wide;
};

// Kernels read raw memory, so sizes that disagree are refused, also where an op is called directly. -1: any size.
inline void check_sizes(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> sizes) {
  bool fits = t.dim() == static_cast<int64_t>(sizes.size());
  int64_t dim = 0;
  for (int64_t size : sizes) fits = fits && (size < 0 || t.size(dim) == size), ++dim;
  if (fits) return;
  std::string wanted, given;
  for (int64_t size : sizes) wanted += (wanted.empty() ? "" : ", ") + (size < 0 ? std::string("*") : std::to_string(size));
  for (int64_t i = 0; i < t.dim(); ++i) given += (i ? ", " : "") + std::to_string(t.size(i));
  STD_TORCH_CHECK(false, op, ": want ", name, " [", wanted, "], got [", given, "]");
}

// Run f(begin, end) over [0, count) on torch's threads, in contiguous shares.
template <class F>
void parallel(int64_t count, int64_t grain, const F& f) {
  if (count > 0) torch::stable::parallel_for(0, count, grain, f);
}

// The same for cores that are not equally fast: a thread takes shares of a contiguous range of its own, ever smaller ones of
// at least `least` (but at the end of a range), then of the others' ranges. What f computes must not depend on the shares.
template <class F>
void parallel_balanced(int64_t count, int64_t least, const F& f) {
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), (count + least - 1) / least);
  if (threads <= 1) return parallel(count, count, f);
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  std::vector<Range> ranges(threads);
  for (int64_t t = 0; t < threads; ++t) ranges[t].next = count * t / threads, ranges[t].end = count * (t + 1) / threads;
  parallel(threads, 1, [&](int64_t own, int64_t) {
    for (int64_t visited = 0; visited < threads; ++visited) {
      Range& range = ranges[(own + visited) % threads];
      for (int64_t begin = range.next.load(); begin < range.end;) {
        const int64_t end = std::min(range.end, begin + std::max(least, (range.end - begin) / 2));
        if (!range.next.compare_exchange_weak(begin, end)) continue;
        f(begin, end);
        begin = range.next.load();
      }
    }
  });
}

// Call the plain PyTorch definition `kimi_k3::<name>.reference`: for dtypes that have no kernel here (float64).
template <class... Args>
std::array<StableIValue, sizeof...(Args)> call_reference(const char* name, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  std::string full = std::string("kimi_k3::") + name;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(full.c_str(), "reference", stack.data(), TORCH_ABI_VERSION));
  return stack;
}
template <class... Args>
Tensor reference_tensor(const char* name, const Args&... args) {
  return torch::stable::detail::to<Tensor>(call_reference(name, args...)[0]);
}

}  // namespace kimi_k3
