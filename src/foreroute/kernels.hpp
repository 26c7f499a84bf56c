// What all compiled loops share: views of NumPy arrays, memory of their own, and random words.
//
// A loop that Python calls is `extern "C"` by LOOP, and takes arrays and structs by const reference, numbers by value.
// Files include one another by their path below src/foreroute. There is no standard library of C++ at run time, and no
// exception: what cannot be done is told by a number that is returned.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LOOP extern "C" __attribute__((visibility("default")))

// A function for processors that have vectors of 32 bytes, beside the same one for all. For loops that take twice as
// long without: the check of routes is a quarter of what it takes to take over those of an engine.
#ifdef __x86_64__
#include <cpuid.h>

#define WIDE __attribute__((target("avx2")))

inline bool has_wide_vectors() {
    uint32_t a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));  // the system keeps them
    return (low & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}
#else
#define WIDE
inline bool has_wide_vectors() { return false; }
#endif

constexpr int64_t NONE = -1;  // no rank, no expert, no slot

template <class T>
T min(T a, T b) {
    return b < a ? b : a;
}

template <class T>
T max(T a, T b) {
    return a < b ? b : a;
}

// Round down as Python does, where the divisor is above zero.
inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
inline int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }

// A contiguous NumPy array of N axes, or a part of one. x(i, j) is an element, x[i] the array of the other axes.
template <class T, int N>
struct Array {
    T *data;
    int64_t shape[N];

    template <class... Index>
    T &operator()(Index... index) const {
        static_assert(sizeof...(index) == N);
        int64_t at = 0;
        int axis = 0;
        ((check(index, axis), at = at * shape[axis] + static_cast<int64_t>(index), ++axis), ...);
        return data[at];
    }

    auto operator[](int64_t i) const {
        check(i, 0);
        if constexpr (N == 1) {
            return data[i];
        } else {
            Array<T, N - 1> part;
            int64_t step = 1;
            for (int axis = 1; axis < N; ++axis) step *= part.shape[axis - 1] = shape[axis];
            part.data = data + i * step;
            return part;
        }
    }

    // Elements from `begin` to before `end` of the first axis.
    Array slice(int64_t begin, int64_t end) const {
#ifdef CHECK_BOUNDS
        if (begin < 0 || end > shape[0]) abort();
#endif
        int64_t step = 1;
        for (int axis = 1; axis < N; ++axis) step *= shape[axis];
        Array part = *this;
        part.data = data + begin * step;
        part.shape[0] = end - begin;
        return part;
    }

    int64_t size() const {
        int64_t all = 1;
        for (int axis = 0; axis < N; ++axis) all *= shape[axis];
        return all;
    }

    int64_t length() const { return shape[0]; }

    void fill(T value) const {
        for (int64_t i = 0, all = size(); i < all; ++i) data[i] = value;
    }

    // The library of the fuzzer ends the process at an index outside of an array.
    void check([[maybe_unused]] int64_t i, [[maybe_unused]] int axis) const {
#ifdef CHECK_BOUNDS
        if (i < 0 || i >= shape[axis]) abort();
#endif
    }

    operator Array<const T, N>() const
        requires(!__is_const(T))
    {
        Array<const T, N> same;
        same.data = data;
        for (int axis = 0; axis < N; ++axis) same.shape[axis] = shape[axis];
        return same;
    }
};

// An array of a loop's own, of zeros, that ends with its scope.
template <class T, int N>
struct Scratch : Array<T, N> {
    template <class... Length>
    explicit Scratch(Length... length) {
        static_assert(sizeof...(length) == N);
        int axis = 0;
        ((this->shape[axis++] = static_cast<int64_t>(length)), ...);
        this->data = static_cast<T *>(calloc(max<int64_t>(this->size(), 1), sizeof(T)));
        if (!this->data) abort();
    }
    ~Scratch() { free(this->data); }
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
};

// Random words that are the same on every machine: splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
inline uint64_t next_word(uint64_t &state) {
    state += 0x9E3779B97F4A7C15;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

// From 0 to below 1.
inline double next_unit(uint64_t &state) { return static_cast<double>(next_word(state) >> 32) * (1.0 / 4294967296.0); }
