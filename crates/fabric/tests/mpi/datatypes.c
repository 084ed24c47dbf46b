/* Derived types: memory with gaps on one side and contiguous bytes on the other, and gaps on
 * both. */
#include <stdlib.h>
#include <string.h>

#include "check.h"

/* Sends `count` elements of a type and receives them as plain bytes, then the reverse, then
 * typed on both sides. `places` are the offsets of the bytes that the type covers, in its order. */
static void carry(MPI_Datatype type, int count, size_t extent, const size_t *places, size_t covered,
                  const char *what)
{
    int to = next_rank(), from = previous_rank(), tag = 3000;
    size_t span = extent * (size_t)count, total = covered * (size_t)count;
    struct buffer holed = buffer_of(span), other = buffer_of(span);
    struct buffer row = buffer_of(total), expected = buffer_of(total);
    MPI_Request send;
    MPI_Status status;
    for (int way = 0; way < 3; way++) {
        int typed_out = way != 1, typed_in = way != 0;
        spoil(holed.bytes, span);
        spoil(other.bytes, span);
        fill(expected.bytes, total, seed_of(self, tag, way));
        memcpy(row.bytes, expected.bytes, total);
        for (size_t element = 0; element < (size_t)count; element++)
            for (size_t place = 0; place < covered; place++)
                holed.bytes[element * extent + places[place]] =
                    expected.bytes[element * covered + place];
        if (typed_out)
            MUST(MPI_Isend(holed.bytes, count, type, to, tag, MPI_COMM_WORLD, &send));
        else
            MUST(MPI_Isend(row.bytes, (int)total, MPI_BYTE, to, tag, MPI_COMM_WORLD, &send));
        struct buffer in = buffer_of(total);
        spoil(in.bytes, total);
        if (typed_in)
            MUST(MPI_Recv(other.bytes, count, type, from, tag, MPI_COMM_WORLD, &status));
        else
            MUST(MPI_Recv(in.bytes, (int)total, MPI_BYTE, from, tag, MPI_COMM_WORLD, &status));
        MUST(MPI_Wait(&send, MPI_STATUS_IGNORE));
        if (typed_in) {
            int elements = -1;
            MUST(MPI_Get_count(&status, type, &elements));
            check_equal(count, elements, "elements of a derived type");
            for (size_t element = 0; element < (size_t)count; element++)
                for (size_t place = 0; place < covered; place++) {
                    uint8_t *byte = &other.bytes[element * extent + places[place]];
                    in.bytes[element * covered + place] = *byte;
                    spoil(byte, 1);
                }
            check_spoiled(other.bytes, span, "the holes of a type");
        }
        check_pattern(in.bytes, total, seed_of(from, tag, way), what);
        buffer_done(&in);
    }
    buffer_done(&holed);
    buffer_done(&other);
    buffer_done(&row);
    buffer_done(&expected);
}

/* Blocks of equal length at equal distances: small blocks, and blocks of several pages. */
void vectors(void)
{
    static const int shapes[][3] = {{3, 1, 2}, {7, 5, 9}, {100, 8, 16}, {64, 1000, 1500}};
    for (size_t shape = 0; shape < sizeof shapes / sizeof shapes[0]; shape++) {
        int blocks = shapes[shape][0], length = shapes[shape][1], stride = shapes[shape][2];
        size_t covered = (size_t)blocks * (size_t)length * 4, at = 0;
        size_t *places = malloc(covered * sizeof *places);
        for (int block = 0; block < blocks; block++)
            for (int byte = 0; byte < 4 * length; byte++)
                places[at++] = (size_t)(block * stride * 4 + byte);
        MPI_Datatype vector, type;
        size_t extent = (size_t)(blocks * stride) * 4;
        MUST(MPI_Type_vector(blocks, length, stride, MPI_INT, &vector));
        MUST(MPI_Type_create_resized(vector, 0, (MPI_Aint)extent, &type));
        MUST(MPI_Type_commit(&type));
        for (int count = 1; count <= (quick ? 3 : 20); count += 2)
            carry(type, count, extent, places, covered, "a vector");
        MUST(MPI_Type_free(&vector));
        MUST(MPI_Type_free(&type));
        free(places);
    }
}

/* Blocks of different lengths, not in ascending order of their offsets. */
void indexed(void)
{
    enum { BLOCKS = 40 };
    int lengths[BLOCKS], offsets[BLOCKS], place = 0;
    size_t covered = 0, at = 0;
    for (int block = 0; block < BLOCKS; block++) {
        lengths[block] = block * 37 % 61;
        offsets[block] = place;
        place += lengths[block] + 1 + block % 5;
        covered += (size_t)lengths[block];
    }
    for (int block = 0; block + 1 < BLOCKS; block += 2) {
        int offset = offsets[block], length = lengths[block];
        offsets[block] = offsets[block + 1], lengths[block] = lengths[block + 1];
        offsets[block + 1] = offset, lengths[block + 1] = length;
    }
    size_t *places = malloc(covered * sizeof *places);
    for (int block = 0; block < BLOCKS; block++)
        for (int byte = 0; byte < lengths[block]; byte++)
            places[at++] = (size_t)(offsets[block] + byte);
    MPI_Datatype blocks, type;
    MUST(MPI_Type_indexed(BLOCKS, lengths, offsets, MPI_BYTE, &blocks));
    MUST(MPI_Type_create_resized(blocks, 0, place, &type));
    MUST(MPI_Type_commit(&type));
    for (int count = 1; count < (quick ? 20 : 400); count = count * 3 + 1)
        carry(type, count, (size_t)place, places, covered, "an indexed type");
    MUST(MPI_Type_free(&blocks));
    MUST(MPI_Type_free(&type));
    free(places);
}

struct particle {
    double position[3];
    char kind;
    int charge;
    short spin[5];
};

/* Fields of different types with gaps between them, in arrays of structures. */
void structs(void)
{
    struct particle *model = NULL;
    int lengths[4] = {3, 1, 1, 5};
    MPI_Aint offsets[4] = {
        offsetof(struct particle, position), offsetof(struct particle, kind),
        offsetof(struct particle, charge), offsetof(struct particle, spin)};
    MPI_Datatype types[4] = {MPI_DOUBLE, MPI_CHAR, MPI_INT, MPI_SHORT}, fields, type;
    size_t widths[4] = {sizeof model->position, 1, sizeof model->charge, sizeof model->spin};
    size_t places[sizeof(struct particle)], covered = 0;
    for (int field = 0; field < 4; field++)
        for (size_t byte = 0; byte < widths[field]; byte++)
            places[covered++] = (size_t)offsets[field] + byte;
    MUST(MPI_Type_create_struct(4, lengths, offsets, types, &fields));
    MUST(MPI_Type_create_resized(fields, 0, sizeof(struct particle), &type));
    MUST(MPI_Type_commit(&type));
    for (int count = 1; count < (quick ? 1000 : 30000); count = count * 5 + 2)
        carry(type, count, sizeof(struct particle), places, covered, "an array of structures");
    MUST(MPI_Type_free(&fields));
    MUST(MPI_Type_free(&type));
}

/* A subarray of a cube. */
void subarrays(void)
{
    int whole[3] = {20, 30, 50}, part[3] = {7, 11, 23}, begin[3] = {3, 5, 17};
    size_t covered = (size_t)(part[0] * part[1] * part[2]) * 8, at = 0;
    size_t extent = (size_t)(whole[0] * whole[1] * whole[2]) * 8;
    size_t *places = malloc(covered * sizeof *places);
    for (int x = 0; x < part[0]; x++)
        for (int y = 0; y < part[1]; y++)
            for (int byte = 0; byte < part[2] * 8; byte++)
                places[at++] = (size_t)(((begin[0] + x) * whole[1] + begin[1] + y) * whole[2] +
                                        begin[2]) * 8 + (size_t)byte;
    MPI_Datatype type;
    MUST(MPI_Type_create_subarray(3, whole, part, begin, MPI_ORDER_C, MPI_DOUBLE, &type));
    MUST(MPI_Type_commit(&type));
    for (int count = 1; count <= 3; count++)
        carry(type, count, extent, places, covered, "a part of an array");
    MUST(MPI_Type_free(&type));
    free(places);
}

/* MPI_Pack, a send as MPI_PACKED, and MPI_Unpack; and a part of a type, counted in elements. */
void packed(void)
{
    int to = next_rank(), from = previous_rank();
    int numbers[3] = {self, self * 2, self * 3}, position = 0, numbers_in[3] = {0, 0, 0};
    double fraction = self / 8.0, fraction_in = 0;
    char out[256], in[256];
    MPI_Status status;
    MUST(MPI_Pack(numbers, 3, MPI_INT, out, sizeof out, &position, MPI_COMM_WORLD));
    MUST(MPI_Pack(&fraction, 1, MPI_DOUBLE, out, sizeof out, &position, MPI_COMM_WORLD));
    MUST(MPI_Sendrecv(out, position, MPI_PACKED, to, 3100, in, sizeof in, MPI_PACKED, from, 3100,
                      MPI_COMM_WORLD, &status));
    position = 0;
    MUST(MPI_Unpack(in, sizeof in, &position, numbers_in, 3, MPI_INT, MPI_COMM_WORLD));
    MUST(MPI_Unpack(in, sizeof in, &position, &fraction_in, 1, MPI_DOUBLE, MPI_COMM_WORLD));
    for (int number = 0; number < 3; number++)
        check_equal(from * (number + 1), numbers_in[number], "a packed number");
    check_true(fraction_in == from / 8.0, "a packed fraction arrives");
    MPI_Datatype pair;
    int five[5] = {1, 2, 3, 4, 5}, room[8] = {0}, elements = 0, count = 0;
    MUST(MPI_Type_contiguous(2, MPI_INT, &pair));
    MUST(MPI_Type_commit(&pair));
    MUST(MPI_Sendrecv(five, 5, MPI_INT, to, 3101, room, 4, pair, from, 3101, MPI_COMM_WORLD,
                      &status));
    MUST(MPI_Get_elements(&status, pair, &elements));
    MUST(MPI_Get_count(&status, pair, &count));
    check_equal(5, elements, "elements of two and a half pairs");
    check_equal(MPI_UNDEFINED, count, "the count of two and a half pairs");
    for (int place = 0; place < 8; place++)
        check_equal(place < 5 ? place + 1 : 0, room[place], "a part of a pair");
    MUST(MPI_Type_free(&pair));
}
