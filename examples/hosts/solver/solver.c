/* solver.c: an ensemble of Burgers' equations over MPI. Some ranks train a network on their fields
 * while they are solved, each rank its own copy: what the program is before dtrain. solver_dtrain.c
 * is the same program whose training ranks train one network together.
 *
 *   build:   mpicc -O2 examples/hosts/solver/solver.c -o solver -lm
 *   run:     mkdir out; mpirun -n 3 ./solver out 2 400         ranks 0 and 1 of 3 train, rank 2 only computes
 *            mpirun -n 3 ./solver out 2 800 400                continues from what was saved at step 400
 *   expect:
 *     rank 0: step  100  energy 0.0759  loss 0.0041070
 *     rank 1: step  100  energy 0.0759  loss 0.0026387
 *     rank 2: step  100  energy 0.0783
 *     ...
 *     rank 0: step  400  energy 0.7168  loss 0.1934119
 *
 * A fine grid resolves what a coarse one does not see. The network learns the difference, the
 * subgrid flux between two coarse cells, from the averages of six cells around. */
#include <mpi.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TRAINED = 6, FINE = 256, RATIO = 8, COARSE = FINE / RATIO, WINDOW = 6, HIDDEN = 16 };
enum { SAMPLES = TRAINED * COARSE, EVERY = 100 }; /* steps between two savings */

typedef struct net {
    float w1[HIDDEN][WINDOW], b1[HIDDEN], w2[HIDDEN], b2;
} net;

static double u[TRAINED][FINE], flux[TRAINED][FINE]; /* of the fields of this rank */
static float x[SAMPLES][WINDOW], y[SAMPLES];
static net weights, grad, velocity;
static bool trains; /* this rank does */

static double wrap(const double *u, int n, int i) { return u[(i + n) % n]; }

/* Return the flux between cells with these averages, of width dx. */
static double flux_between(double left, double right, double dx)
{
    const double speed = fmax(fabs(left), fabs(right));
    return (left * left + right * right) / 4 - speed * (right - left) / 2 -
           0.02 * (right - left) / dx;
}

/* Make one step of field number f, the i-th of this rank. flux is that at the right side of each
 * cell, before the step. */
static void solve(int i, int f, int step)
{
    const double dx = 6.283185307 / FINE, dt = 0.004;
    for (int c = 0; c < FINE; c++) flux[i][c] = flux_between(u[i][c], wrap(u[i], FINE, c + 1), dx);
    for (int c = 0; c < FINE; c++) {
        const double force = sin((1 + f % 3) * c * dx + 0.7 * f + dt * step);
        u[i][c] += dt * (force - (flux[i][c] - wrap(flux[i], FINE, c - 1)) / dx);
    }
}

/* Of the i-th field: write the averages around each coarse side to x, and 10 times what the coarse
 * flux lacks to y. */
static void sample(int i)
{
    double mean[COARSE] = {0};
    for (int c = 0; c < FINE; c++) mean[c / RATIO] += u[i][c] / RATIO;
    for (int c = 0; c < COARSE; c++) {
        for (int k = 0; k < WINDOW; k++)
            x[i * COARSE + c][k] = (float)wrap(mean, COARSE, c + k - WINDOW / 2 + 1);
        const double coarse =
            flux_between(mean[c], wrap(mean, COARSE, c + 1), RATIO * 6.283185307 / FINE);
        y[i * COARSE + c] = (float)(10 * (flux[i][c * RATIO + RATIO - 1] - coarse));
    }
}

/* Make the gradient of the mean squared error over n samples; return that error. */
static float gradient(int n)
{
    static float h[SAMPLES][HIDDEN], error[SAMPLES];
    const net *w = &weights;
    float loss = 0;
    memset(&grad, 0, sizeof grad);
    for (int s = 0; s < n; s++) {
        error[s] = w->b2 - y[s];
        for (int j = 0; j < HIDDEN; j++) {
            float sum = w->b1[j];
            for (int k = 0; k < WINDOW; k++) sum += w->w1[j][k] * x[s][k];
            h[s][j] = tanhf(sum);
            error[s] += w->w2[j] * h[s][j];
        }
        loss += error[s] * error[s] / (float)n;
    }
    for (int s = 0; s < n; s++) {
        grad.b2 += 2 * error[s] / (float)n;
        for (int j = 0; j < HIDDEN; j++) grad.w2[j] += 2 * error[s] * h[s][j] / (float)n;
    }
    for (int s = 0; s < n; s++)
        for (int j = 0; j < HIDDEN; j++) {
            const float dh = 2 * error[s] * w->w2[j] * (1 - h[s][j] * h[s][j]) / (float)n;
            grad.b1[j] += dh;
            for (int k = 0; k < WINDOW; k++) grad.w1[j][k] += dh * x[s][k];
        }
    return loss;
}

/* Gradient descent with momentum. */
static void update(void)
{
    float *w = (float *)&weights, *v = (float *)&velocity;
    const float *g = (const float *)&grad;
    for (size_t i = 0; i < sizeof(net) / sizeof(float); i++) {
        v[i] = 0.9f * v[i] + g[i];
        w[i] -= 0.02f * v[i];
    }
}

/* Read or write what a file of the output folder has. */
static bool file(const char *mode, const char *out, const char *what, int number, int step,
                 void *data, size_t bytes)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s-%d-%06d.bin", out, what, number, step);
    FILE *f = fopen(path, mode);
    const size_t moved = !f               ? 0
                         : mode[0] == 'r' ? fread(data, 1, bytes, f)
                                          : fwrite(data, 1, bytes, f);
    if (f && fclose(f) == 0 && moved == bytes) return true;
    fprintf(stderr, "solver: %s is not %s whole\n", path, mode[0] == 'r' ? "read" : "written");
    return false;
}

int main(int argc, char **argv)
{
    int rank, size, mine = 0, number[TRAINED];
    bool good = true;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const char *const out = argv[1];
    const int trainers = argc > 3 ? atoi(argv[2]) : 0, steps = argc > 3 ? atoi(argv[3]) : 0;
    const int from = argc > 4 ? atoi(argv[4]) : 0;
    if (trainers < 1 || trainers > size || TRAINED % trainers != 0 || from % EVERY != 0) {
        if (rank == 0)
            fprintf(stderr,
                    "usage: solver FOLDER TRAINERS STEPS [FROM]; TRAINERS is 1, 2, 3 or 6\n");
        MPI_Finalize();
        return 2;
    }
    /* Ranks that train divide the fields 0 to 5, each other one solves one more. */
    trains = rank < trainers;
    for (int f = rank; trains && f < TRAINED; f += trainers) number[mine++] = f;
    if (!trains) number[mine++] = TRAINED + rank - trainers;
    for (int i = 0; i < HIDDEN * WINDOW; i++)
        weights.w1[i / WINDOW][i % WINDOW] = 0.5f * sinf((float)(i * i + rank));
    for (int j = 0; j < HIDDEN; j++) weights.w2[j] = 0.2f * cosf((float)(j * j + rank));
    for (int i = 0; i < mine && from; i++)
        good &= file("rb", out, "field", number[i], from, u[i], sizeof u[i]);
    if (trains && from) {
        good &= file("rb", out, "net", rank, from, &weights, sizeof weights);
        good &= file("rb", out, "velocity", rank, from, &velocity, sizeof velocity);
    }
    for (int step = from; step < steps && good; step++) {
        float loss = 0;
        double energy = 0;
        for (int i = 0; i < mine; i++) {
            solve(i, number[i], step);
            if (trains) sample(i);
        }
        if (trains) loss = gradient(COARSE * mine);
        if (trains) update();
        if ((step + 1) % EVERY) continue;
        for (int i = 0; i < mine * FINE; i++)
            energy += u[i / FINE][i % FINE] * u[i / FINE][i % FINE] / (mine * FINE);
        char text[32] = "";
        if (trains) snprintf(text, sizeof text, "  loss %.7f", (double)loss);
        printf("rank %d: step %4d  energy %.4f%s\n", rank, step + 1, energy, text);
        fflush(stdout);
        for (int i = 0; i < mine; i++)
            good &= file("wb", out, "field", number[i], step + 1, u[i], sizeof u[i]);
        if (trains) {
            good &= file("wb", out, "net", rank, step + 1, &weights, sizeof weights);
            good &= file("wb", out, "velocity", rank, step + 1, &velocity, sizeof velocity);
        }
    }
    MPI_Finalize();
    return good ? 0 : 1;
}
