// Kernels of the machine's own tests, right ones and wrong ones. A tile is 1024 bytes.
#include "simt.h"

constexpr i64 SIM_TILE = 1024;

// Fills bytes.
KERNEL(sim_fill, u8 *to, i64 count, i64 byte) {
    FOR_TILES(t) {
        for (i64 i = t * SIM_TILE; i < count && i < (t + 1) * SIM_TILE; i += LANES) {
            FOR_LANES(l) if (i + l < count) to[i + l] = (u8)byte;
        }
    }
}

// Adds a number to each byte of an array.
KERNEL(sim_add, u8 *to, const u8 *from, i64 count, i64 number) {
    FOR_TILES(t) {
        for (i64 i = t * SIM_TILE; i < count && i < (t + 1) * SIM_TILE; i += LANES) {
            FOR_LANES(l) if (i + l < count) to[i + l] = (u8)(from[i + l] + number);
        }
    }
}

// Scales doubles, so that the machine's own tests pass one by value.
KERNEL(sim_scale, double *values, i64 count, double by) {
    FOR_TILES(t) {
        for (i64 i = t * SIM_TILE; i < count && i < (t + 1) * SIM_TILE; i += LANES) {
            FOR_LANES(l) if (i + l < count) values[i + l] *= by;
        }
    }
}

// Copies one byte through an address that it reads from memory.
KERNEL(sim_indirect, const u64 *addresses, u8 *to) {
    FOR_TILES(t) {
        ONE_LANE { *to = *(const u8 *)addresses[0]; }
    }
}
