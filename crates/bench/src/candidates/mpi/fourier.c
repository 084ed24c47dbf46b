/* Three-dimensional Fourier transform after the FT kernel of the NAS benchmarks: every rank holds
 * some planes of a cube, transforms them in two dimensions, exchanges them so that it holds complete
 * columns, and transforms those. fourier.rs does the same steps in the same order. */
#include <math.h>
#include <string.h>

#include "member.h"

struct complex {
    double re, im;
};

struct cube {
    size_t points; /* along an edge */
    size_t planes; /* of this rank */
    size_t cells;  /* of this rank */
    struct complex *field, *work, *packed, *columns, *scratch;
    struct complex *roots; /* of unity, forward */
    double messages_ns;
};

/* Transforms along the slow axis of an array of `points` rows of `width` cells (Stockham, radix 2).
 * The result is in `data`. */
static void transform_rows(struct complex *restrict data, struct complex *restrict scratch,
                           const struct complex *roots, size_t points, size_t width)
{
    struct complex *from = data, *to = scratch;
    size_t stride = width;
    for (size_t length = points; length > 1; length /= 2) {
        size_t half = length / 2, step = points / length;
        for (size_t p = 0; p < half; p++) {
            struct complex root = roots[p * step];
            const struct complex *restrict a = from + stride * p;
            const struct complex *restrict b = from + stride * (p + half);
            struct complex *restrict sum = to + stride * 2 * p;
            struct complex *restrict difference = to + stride * (2 * p + 1);
            for (size_t q = 0; q < stride; q++) {
                double re = a[q].re - b[q].re, im = a[q].im - b[q].im;
                sum[q].re = a[q].re + b[q].re;
                sum[q].im = a[q].im + b[q].im;
                difference[q].re = re * root.re - im * root.im;
                difference[q].im = re * root.im + im * root.re;
            }
        }
        struct complex *other = from;
        from = to;
        to = other;
        stride *= 2;
    }
    if (from != data)
        memcpy(data, from, points * width * sizeof *data);
}

static void transform_planes(struct cube *cube)
{
    size_t points = cube->points;
    for (size_t plane = 0; plane < cube->planes; plane++) {
        struct complex *start = cube->work + plane * points * points;
        for (size_t row = 0; row < points; row++)
            transform_rows(start + row * points, cube->scratch, cube->roots, points, 1);
        transform_rows(start, cube->scratch, cube->roots, points, points);
    }
}

/* Converts this rank's planes of all rows to this rank's rows of all planes. */
static void transpose(struct cube *cube)
{
    size_t points = cube->points, planes = cube->planes;
    size_t part = planes * points, block = planes * part; /* cells per plane and rank, and per rank */
    for (int rank = 0; rank < ranks; rank++)
        for (size_t plane = 0; plane < planes; plane++)
            memcpy(cube->packed + (size_t)rank * block + plane * part,
                   cube->work + plane * points * points + (size_t)rank * part,
                   part * sizeof *cube->work);
    double begin = now_ns();
    MPI_Alltoall(cube->packed, (int)(2 * block), MPI_DOUBLE, cube->work, (int)(2 * block),
                 MPI_DOUBLE, MPI_COMM_WORLD);
    cube->messages_ns += now_ns() - begin;
    for (size_t depth = 0; depth < points; depth++)
        for (size_t row = 0; row < planes; row++)
            memcpy(cube->columns + (row * points + depth) * points,
                   cube->work + (depth * planes + row) * points, points * sizeof *cube->work);
}

/* Transforms `field` into `columns`, which is ordered by row, plane, column. */
static void transform_once(struct cube *cube)
{
    size_t sheet = cube->points * cube->points;
    memcpy(cube->work, cube->field, cube->cells * sizeof *cube->work);
    transform_planes(cube);
    transpose(cube);
    for (size_t row = 0; row < cube->planes; row++)
        transform_rows(cube->columns + row * sheet, cube->scratch, cube->roots, cube->points,
                       cube->points);
}

static double energy(const struct complex *cells, size_t count)
{
    double sum = 0, all = 0;
    for (size_t cell = 0; cell < count; cell++)
        sum += cells[cell].re * cells[cell].re + cells[cell].im * cells[cell].im;
    MPI_Allreduce(&sum, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return all;
}

/* Returns whether the transform preserves the energy, up to the factor of the number of cells. */
static int keeps_energy(struct cube *cube)
{
    double cells = (double)cube->cells * ranks, before = energy(cube->field, cube->cells);
    return all_agree(fabs(energy(cube->columns, cube->cells) / cells - before) < 1e-9 * before);
}

/* Returns whether the inverse transform restores the field, which is saved in `kept`. The inverse is a
 * second transform with real and imaginary parts swapped before and after; it also transposes rows and
 * planes back. */
static int comes_back(struct cube *cube, struct complex *kept)
{
    double cells = (double)cube->cells * ranks;
    transform_once(cube);
    memcpy(kept, cube->field, cube->cells * sizeof *kept);
    for (size_t cell = 0; cell < cube->cells; cell++)
        cube->field[cell] = (struct complex){cube->columns[cell].im, cube->columns[cell].re};
    transform_once(cube);
    int right = 1;
    for (size_t cell = 0; cell < cube->cells; cell++) {
        double re = cube->columns[cell].im / cells - kept[cell].re;
        double im = cube->columns[cell].re / cells - kept[cell].im;
        right &= fabs(re) < 1e-9 && fabs(im) < 1e-9;
    }
    memcpy(cube->field, kept, cube->cells * sizeof *kept);
    return all_agree(right);
}

static void fill(struct cube *cube)
{
    const double circle = 6.283185307179586;
    for (size_t cell = 0; cell < cube->cells; cell++) {
        uint64_t value = mixed((uint64_t)rank_of_self * cube->cells + cell);
        cube->field[cell].re = (double)(value >> 32) / 4294967296.0 - 0.5;
        cube->field[cell].im = (double)(value & 0xFFFFFFFFu) / 4294967296.0 - 0.5;
    }
    for (size_t p = 0; p < cube->points; p++) {
        double angle = -circle * (double)p / (double)cube->points;
        cube->roots[p] = (struct complex){cos(angle), sin(angle)};
    }
}

static const char *run(struct cube *cube, long iterations, struct timing *timing)
{
    static size_t checked_points;
    fill(cube);
    if (checked_points != cube->points) {
        size_t bytes = cube->cells * sizeof *cube->field;
        struct complex *kept = touched_pages(bytes);
        int right = all_agree(kept != NULL) && comes_back(cube, kept);
        release_pages(kept, bytes);
        if (!right)
            return "the inverse transform does not give the field back";
        checked_points = cube->points;
    }
    for (long turn = warm_up_of(iterations); turn > 0; turn--)
        transform_once(cube);
    MPI_Barrier(MPI_COMM_WORLD);
    cube->messages_ns = 0;
    double begin = now_ns();
    for (long turn = 0; turn < iterations; turn++)
        transform_once(cube);
    timing->total_ns = now_ns() - begin;
    timing->messages_ns = cube->messages_ns;
    return keeps_energy(cube) ? NULL : "the transform lost energy";
}

const char *fourier(long points, long iterations, struct timing *timing)
{
    if (points < 2 || points > 1024 || (points & (points - 1)) != 0 || points % ranks != 0)
        return "the planes cannot be dealt to the ranks";
    size_t edge = (size_t)points, planes = edge / (size_t)ranks;
    struct cube cube = {.points = edge, .planes = planes, .cells = planes * edge * edge};
    size_t bytes = cube.cells * sizeof *cube.field, sheet = edge * edge * sizeof *cube.field;
    cube.field = touched_pages(bytes);
    cube.work = touched_pages(bytes);
    cube.packed = touched_pages(bytes);
    cube.columns = touched_pages(bytes);
    cube.scratch = touched_pages(sheet);
    cube.roots = touched_pages(sheet);
    int enough = cube.field && cube.work && cube.packed && cube.columns && cube.scratch && cube.roots;
    const char *error =
        all_agree(enough) ? run(&cube, iterations, timing) : "no memory for the cube";
    release_pages(cube.field, bytes);
    release_pages(cube.work, bytes);
    release_pages(cube.packed, bytes);
    release_pages(cube.columns, bytes);
    release_pages(cube.scratch, sheet);
    release_pages(cube.roots, sheet);
    return error;
}
