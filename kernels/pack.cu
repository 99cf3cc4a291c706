// pack_gather_<bytes>, pack_scatter_<bytes>: the elements of a strided array, in C order, to or from contiguous memory.
// pack_bucket: many ranges of bytes to or from one. Elements are 1, 2, 4, 8 or 16 bytes; a tile is 1024 of them.
#include "bytes.h"

constexpr i64 TILE = 1024;
constexpr int MOST_DIMENSIONS = 64;
constexpr i64 SHORT_ROW = 8;  // in shorter rows most lanes of a warp would be idle

struct alignas(8) Pair {
    u64 low, high;
};

// The array: element (i0, i1, ...) is at base + i0 * strides[0] + i1 * strides[1] + ...; strides are in bytes, of any sign.
struct Strided {
    u8 *base;
    i64 ndim;
    const i64 *shape, *strides;
};

struct Gather {
    template <class E>
    static MEMBER void one(u8 *strided, u8 *contiguous) {
        store_element<E>(contiguous, load_element<E>(strided));
    }
    static MEMBER void span(u8 *strided, u8 *contiguous, i64 nbytes) { copy_bytes(contiguous, strided, nbytes); }
};

struct Scatter {
    template <class E>
    static MEMBER void one(u8 *strided, u8 *contiguous) {
        store_element<E>(strided, load_element<E>(contiguous));
    }
    static MEMBER void span(u8 *strided, u8 *contiguous, i64 nbytes) { copy_bytes(strided, contiguous, nbytes); }
};

// index = the position of element `number`, counted in C order.
DEVICE void find(const Strided &array, i64 number, i64 *index) {
    warp_sync();
    ONE_LANE {
        ROLLED for (i64 d = array.ndim - 1; d > 0; --d) {
            index[d] = number % array.shape[d];
            number /= array.shape[d];
        }
        index[0] = number;
    }
    warp_sync();
}

// Moves `index` to the start of the next row.
DEVICE void next_row(const Strided &array, i64 *index) {
    warp_sync();
    ONE_LANE {
        i64 d = array.ndim - 1;
        index[d] = 0;
        ROLLED while (--d >= 0 && ++index[d] == array.shape[d]) index[d] = 0;
    }
    warp_sync();
}

DEVICE u8 *address_of(const Strided &array, const i64 *index) {
    u8 *at = array.base;
    ROLLED for (i64 d = 0; d < array.ndim; ++d) at += index[d] * array.strides[d];
    return at;
}

// The address `ahead` elements after `index`: a mixed-radix addition that divides only on a carry.
DEVICE u8 *address_ahead(const Strided &array, const i64 *index, u32 ahead) {
    u8 *at = array.base;
    ROLLED for (i64 d = array.ndim - 1; d >= 0; --d) {
        i64 digit = index[d] + ahead;
        ahead = 0;
        if (d > 0 && digit >= array.shape[d]) {
            const i64 beyond = digit - array.shape[d];  // less than a tile
            ahead = 1 + (u32)beyond / (u32)array.shape[d];
            digit -= (i64)ahead * array.shape[d];
        }
        at += digit * array.strides[d];
    }
    return at;
}

template <class Way, class E>
DEVICE void copy_row(u8 *strided, i64 stride, u8 *contiguous, i64 count) {
    if (stride == (i64)sizeof(E)) return Way::span(strided, contiguous, count * stride);
    i64 i = 0;
    for (; i + LANES <= count; i += LANES) {
        FOR_LANES(l) Way::template one<E>(strided + (i + l) * stride, contiguous + (i + l) * (i64)sizeof(E));
    }
    FOR_LANES(l) {
        if (i + l < count) Way::template one<E>(strided + (i + l) * stride, contiguous + (i + l) * (i64)sizeof(E));
    }
}

template <class Way, class E>
DEVICE void copy_rows(const Strided &array, i64 *index, u8 *contiguous, i64 count) {
    const i64 inner = array.ndim - 1;
    ROLLED while (count > 0) {
        const i64 left = array.shape[inner] - index[inner];
        const i64 length = left < count ? left : count;
        copy_row<Way, E>(address_of(array, index), array.strides[inner], contiguous, length);
        contiguous += length * (i64)sizeof(E);
        count -= length;
        if (count > 0) next_row(array, index);
    }
}

template <class Way, class E>
DEVICE void copy_elements(const Strided &array, const i64 *index, u8 *contiguous, i64 count) {
    ROLLED for (i64 i = 0; i < count; i += LANES) {
        FOR_LANES(l) {
            const i64 number = i + l;
            if (number < count) {
                Way::template one<E>(address_ahead(array, index, (u32)number), contiguous + number * (i64)sizeof(E));
            }
        }
    }
}

template <class Way, class E>
DEVICE void pack(i64 first, i64 last, const Strided &array, u8 *contiguous, i64 count) {
    WARP_SHARED(i64, index, MOST_DIMENSIONS);
    FOR_TILES(t) {
        const i64 start = t * TILE;
        const i64 length = count - start < TILE ? count - start : TILE;
        u8 *there = contiguous + start * (i64)sizeof(E);
        find(array, start, index);
        if (array.ndim > 1 && array.shape[array.ndim - 1] < SHORT_ROW) {
            copy_elements<Way, E>(array, index, there, length);
        } else {
            copy_rows<Way, E>(array, index, there, length);
        }
    }
}

#define PACK(size, E) \
    KERNEL(pack_gather_##size, u8 *base, u8 *contiguous, i64 count, i64 ndim, const i64 *shape, const i64 *strides) { \
        pack<Gather, E>(first, last, {base, ndim, shape, strides}, contiguous, count); \
    } \
    KERNEL(pack_scatter_##size, u8 *base, u8 *contiguous, i64 count, i64 ndim, const i64 *shape, const i64 *strides) { \
        pack<Scatter, E>(first, last, {base, ndim, shape, strides}, contiguous, count); \
    }

PACK(1, u8)
PACK(2, u16)
PACK(4, u32)
PACK(8, u64)
PACK(16, Pair)

struct Piece {
    u64 address, offset, nbytes;
};

// A tile is one copy: `nbytes` between `address` and `offset` in the bucket. Direction 0 fills the bucket, 1
// empties it.
KERNEL(pack_bucket, const Piece *pieces, i64 count, u8 *bucket, i64 direction) {
    FOR_TILES(t) {
        if (t >= count) return;
        u8 *tensor = (u8 *)pieces[t].address, *there = bucket + pieces[t].offset;
        const i64 nbytes = (i64)pieces[t].nbytes;
        if (direction == 0) Gather::span(tensor, there, nbytes);
        else Scatter::span(tensor, there, nbytes);
    }
}
