/* test_boxes.c: what two pieces of a tensor have in common, against loops over every element: random shapes, cut by
 * rows, by columns, by components and into runs, on a saving and on a loading side of 1 to 8 ranks each. */
#include "test.h"

#include "state/box_internal.h"

enum { MOST = 4096, PIECES = 64 };

static uint64_t random_state;
static int64_t below(int64_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (int64_t)(random_state % (uint64_t)limit);
}

/* All elements of a tensor that a piece has, in its order: naive, by counting coordinates. */
static int64_t elements_of(const dtrain_piece *p, const int64_t shape[4], int64_t *list)
{
    int64_t n[4], whole[4], count = 0, at = 0;
    for (int d = 0; d < 4; d++) {
        n[d] = p->length[d] ? p->length[d] : 1;
        whole[d] = shape[d] ? shape[d] : 1;
    }
    for (int64_t a = 0; a < n[0]; a++)
        for (int64_t b = 0; b < n[1]; b++)
            for (int64_t c = 0; c < n[2]; c++)
                for (int64_t d = 0; d < n[3]; d++, at++)
                    if (at >= p->offset && at < p->offset + p->count)
                        list[count++] =
                            (((p->first[0] + a) * whole[1] + p->first[1] + b) * whole[2] +
                             p->first[2] + c) *
                                whole[3] +
                            p->first[3] + d;
    return count;
}

typedef struct cut {
    dtrain_piece pieces[PIECES];
    int count;
} cut;

/* Cut a piece into runs of any length, as a strategy that shards does. */
static void cut_runs(cut *out, dtrain_piece piece, int ranks)
{
    const int64_t end = piece.offset + piece.count;
    for (int r = 0; r < ranks && out->count < PIECES; r++) {
        piece.count = r == ranks - 1 ? end - piece.offset : below(end - piece.offset + 1);
        out->pieces[out->count++] = piece;
        piece.offset += piece.count;
    }
}

/* Cut a tensor along an axis, component by component, and each slice into runs. */
static void cut_tensor(cut *out, const int64_t shape[4], int dims)
{
    const int axis = (int)below(dims), components = 1 + (int)below(3), ranks = 1 + (int)below(8);
    const int slices = 1 + (int)below(ranks);
    int64_t first = 0;
    out->count = 0;
    for (int c = 0; c < components; c++) {
        const int64_t left = shape[axis] - first;
        const int64_t width = c == components - 1 ? left : below(left + 1), end = first + width;
        for (int s = 0; s < slices; s++) {
            dtrain_piece piece = dtrain__piece_whole(shape);
            piece.first[axis] = first;
            piece.length[axis] = s == slices - 1 ? end - first : below(end - first + 1);
            first += piece.length[axis];
            if (!piece.length[axis]) continue;
            piece.count = dtrain__box_count(&piece);
            cut_runs(out, piece, out->count < PIECES / 2 ? 1 + (int)below(3) : 1);
        }
    }
}

/* Compare what two pieces have in common, where it lies in both, and how far it goes on. */
static bool same_common(const dtrain_piece *a, const dtrain_piece *b, const int64_t shape[4])
{
    static int64_t in_a[MOST], in_b[MOST], found[MOST];
    const int64_t count_a = elements_of(a, shape, in_a), count_b = elements_of(b, shape, in_b);
    int64_t i = 0, k = 0, n = 0;
    dtrain_piece common;
    const bool any = dtrain__piece_common(a, b, &common);
    const int64_t count = any ? elements_of(&common, shape, found) : 0;
    int64_t left_a = 0, left_b = 0, last_a = -1, last_b = -1;
    while (i < count_a && k < count_b) {
        if (in_a[i] < in_b[k]) i++;
        else if (in_a[i] > in_b[k]) k++;
        else {
            const int64_t at = common.offset + n;
            if (n >= count || found[n] != in_a[i]) return false;
            if (dtrain__piece_place(a, &common, at) != i) return false;
            if (dtrain__piece_place(b, &common, at) != k) return false;
            if ((left_a > 0 && i != last_a + 1) || (left_b > 0 && k != last_b + 1)) return false;
            left_a = dtrain__piece_span(a, &common, at) - 1;
            left_b = dtrain__piece_span(b, &common, at) - 1;
            if (left_a < 0 || left_b < 0) return false;
            last_a = i++, last_b = k++;
            n++;
        }
    }
    return n == count && any == (n > 0);
}

static bool run_seed(uint64_t seed)
{
    int64_t shape[4] = {0, 0, 0, 0};
    static cut saved, loaded;
    random_state = seed * 0x9e3779b97f4a7c15u + 1;
    for (int i = 0; i < 8; i++) below(2);
    const int dims = 1 + (int)below(4);
    for (int d = 0; d < dims; d++)
        shape[d] = 1 + below(dims == 1 ? 900 : dims == 2 ? 40 : dims == 3 ? 11 : 6);
    cut_tensor(&saved, shape, dims);
    cut_tensor(&loaded, shape, dims);
    for (int k = 0; k < loaded.count; k++) {
        int64_t sum = 0;
        const dtrain_piece *to = &loaded.pieces[k];
        if (!CHECK_MSG(dtrain__piece_fits(to, shape), "seed %llu", (unsigned long long)seed))
            return false;
        for (int i = 0; i < saved.count; i++) {
            dtrain_piece common;
            const dtrain_piece *from = &saved.pieces[i];
            if (!CHECK_MSG(same_common(from, to, shape), "seed %llu: saved %d, loaded %d",
                           (unsigned long long)seed, i, k))
                return false;
            if (dtrain__piece_common(from, to, &common)) sum += common.count;
        }
        if (!CHECK_MSG(sum == to->count, "seed %llu: %lld of %lld elements",
                       (unsigned long long)seed, (long long)sum, (long long)to->count))
            return false;
    }
    return true;
}

static void test_common_pieces(void)
{
    const uint64_t first = test_seed(), count = test_full() ? 100000 : 3000;
    for (uint64_t i = 0; i < count && run_seed(first + i); i++) {}
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_common_pieces);
    return test_summary();
}
