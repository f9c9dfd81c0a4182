/* test_metrics.c: metrics: the JSON lines read back, the table and the live line looked at,
 * full disks, means.
 *
 *     make build/tests/test_metrics && build/tests/test_metrics */
#include "test.h"
#include "dtrain.h"
#include "warned_ranks.h"
#include <signal.h>
#include <sys/stat.h>
#include <fcntl.h>
#include <locale.h>
#include <sys/ioctl.h>
#include <sys/resource.h>

static char log_path[64];  /* of the JSON lines */
static char text[1 << 20]; /* what read_back found */

/* Runs one function as the only rank, in this process. */
static void with_world(dtrain_rank_fn rank_main, void *user)
{
    CHECK_MSG(with_ranks(1, DTRAIN_LAUNCH_THREADS, NULL, rank_main, user) == DTRAIN_OK, "%s",
              dtrain_last_error());
}

static const char *read_back(const char *path)
{
    FILE *file = fopen(path, "rb");
    size_t got = file ? fread(text, 1, sizeof text - 1, file) : 0;
    CHECK_MSG(file != NULL, "%s: %s", path, strerror(errno));
    if (file) fclose(file);
    text[got] = 0;
    return text;
}

static void add(dtrain_step_record *r, const char *name, const char *unit, double value)
{
    CHECK(dtrain_record_add(r, name, unit, value) == DTRAIN_OK);
}

static dtrain_step_record record_of(int64_t step)
{
    dtrain_step_record r;
    memset(&r, 0, sizeof r);
    r.step = step;
    r.loss = 4.5 - 0.001 * (double)step;
    r.val_loss = r.val_accuracy = NAN;
    r.grad_norm = 0.914;
    r.lr = 9.8e-4;
    r.tokens = (uint64_t)(step + 1) * 512;
    add(&r, "throughput/tokens_per_second", "", 41234.5);
    add(&r, "time/step_ms", "ms", 18.5);
    add(&r, "time/comm_ms", "ms", 0.4);
    add(&r, "time/exposed_comm_ms", "ms", 0.1);
    add(&r, "time/data_ms", "ms", 0.25);
    add(&r, "sent/comm_bytes", "bytes", 1000);
    return r;
}

/* ---- a reader of one flat JSON object ---- */

/* Value of "key" in the line as text, NULL when it is not there. Values hold no commas here. */
static const char *json_value(const char *line, const char *key)
{
    static char value[64];
    char pattern[64];
    snprintf(pattern, sizeof pattern, "\"%s\": ", key);
    const char *at = strstr(line, pattern);
    if (!at || at > line + strcspn(line, "\n")) return NULL;
    at += strlen(pattern);
    snprintf(value, sizeof value, "%.*s", (int)strcspn(at, ",}\n"), at);
    return value;
}

static double json_number(const char *line, const char *key)
{
    const char *value = json_value(line, key);
    char *end = NULL;
    CHECK_MSG(value != NULL, "no key %s", key);
    double number = value ? strtod(value, &end) : 0;
    CHECK_MSG(end && *end == 0, "%s: %s is no number", key, value ? value : "(none)");
    return number;
}

static const char *next_line(const char *line)
{
    const char *end = strchr(line, '\n');
    return end ? end + 1 : line + strlen(line);
}

static int count_keys(const char *line)
{
    int count = 0;
    for (const char *c = line; *c && *c != '\n'; c++) count += *c == ':';
    return count;
}

static int has_python(void) { return system("python3 -c 0 >/dev/null 2>&1") == 0; }

/* Every line by itself must be JSON to someone else's parser. */
static void check_with_python(const char *path)
{
    char command[512];
    if (!has_python()) return;
    snprintf(command, sizeof command,
             "python3 -c 'import sys, json\n"
             "for line in open(sys.argv[1]): json.loads(line, parse_constant=lambda x: 1 / 0)' %s",
             path);
    CHECK_MSG(system(command) == 0, "python3 cannot read %s", path);
}

/* ---- the file ---- */

static int json_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.jsonl_path = log_path;
    desc.run_name = "a \"run\"";
    desc.config = "lr = 0.1\n# a comment\n";
    if (!CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK)) return 1;
    for (int64_t step = 0; step < 20; step++) {
        dtrain_step_record r = record_of(step);
        if (step == 9) r.val_loss = 4.25, r.val_accuracy = 0.75;
        if (step == 12) r.grad_norm = INFINITY;
        if (step == 13) r.loss = NAN;
        CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK);
        const char *seen = read_back(log_path); /* flushed line by line */
        CHECK(seen[strlen(seen) - 1] == '\n');
    }
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_OK);
    dtrain_metrics_destroy(metrics);
    return 0;
}

/* Says whether a line has a text in it. */
static bool holds(const char *line, const char *part)
{
    const char *at = strstr(line, part);
    return at && at < next_line(line);
}

/* The time of a line lies between two moments, and has milliseconds. */
static void check_time(const char *line, time_t from)
{
    const double at = json_number(line, "wall_time");
    const char *text = json_value(line, "wall_time");
    CHECK(at >= (double)from && at <= (double)time(NULL) + 1);
    CHECK_MSG(text && strlen(text) > 4 && text[strlen(text) - 4] == '.', "%s", text);
}

static void test_json_lines(void)
{
    const time_t begin = time(NULL);
    char host[65] = "", pattern[100];
    with_world(json_rank, NULL);
    const char *line = read_back(log_path);
    CHECK(gethostname(host, sizeof host - 1) == 0);
    snprintf(pattern, sizeof pattern, "\"host\": \"%s\"", host);
    CHECK(strncmp(line, "{\"start\": true, ", 16) == 0 && holds(line, pattern));
    CHECK(holds(line, "\"dtrain\": \"" DTRAIN_VERSION_STRING "\""));
    CHECK(holds(line, "\"run\": \"a \\\"run\\\"\""));
    CHECK(holds(line, "\"config\": \"lr = 0.1\\n# a comment\\n\"}\n"));
    CHECK(json_number(line, "ranks") == 1 && json_number(line, "threads") >= 1);
    check_time(line, begin);
    line = next_line(line);
    for (int step = 0; step < 20; step++, line = next_line(line)) {
        CHECK(line[0] == '{' && strchr(line, '}') == next_line(line) - 2);
        CHECK(count_keys(line) == (step == 9 ? 14 : 12));
        check_time(line, begin);
        CHECK(json_number(line, "step") == step);
        CHECK(json_number(line, "tokens") == (step + 1) * 512);
        CHECK(json_number(line, "comm_bytes") == 1000);
        CHECK_CLOSE(json_number(line, "lr"), 9.8e-4, 1e-12);
        CHECK_CLOSE(json_number(line, "tokens_per_second"), 41234.5, 0);
        CHECK_CLOSE(json_number(line, "step_ms"), 18.5, 0);
        CHECK_CLOSE(json_number(line, "comm_ms"), 0.4, 1e-9);
        CHECK_CLOSE(json_number(line, "exposed_comm_ms"), 0.1, 1e-9);
        CHECK(json_number(line, "data_ms") == 0.25);
        if (step == 13) CHECK(strcmp(json_value(line, "loss"), "null") == 0);
        else CHECK_CLOSE(json_number(line, "loss"), 4.5 - 0.001 * step, 1e-8);
        if (step == 12) CHECK(strcmp(json_value(line, "grad_norm"), "null") == 0);
        else CHECK_CLOSE(json_number(line, "grad_norm"), 0.914, 1e-8);
        if (step == 9) CHECK(json_number(line, "val_loss") == 4.25);
        else CHECK(json_value(line, "val_loss") == NULL);
        if (step == 9) CHECK(json_number(line, "val_accuracy") == 0.75);
        else CHECK(json_value(line, "val_accuracy") == NULL);
    }
    CHECK(strncmp(line, "{\"final\": true, ", 16) == 0 && json_number(line, "step") == 19);
    check_time(line, begin);
    CHECK_CLOSE(json_number(line, "loss"), 4.481, 1e-8);
    CHECK(json_number(line, "val_loss") == 4.25 && json_number(line, "val_accuracy") == 0.75);
    CHECK(json_number(line, "first_loss") == 4.5);
    CHECK(json_number(line, "steps") == 20);
    CHECK(json_number(line, "tokens") == 10240);
    CHECK(json_number(line, "comm_bytes") == 20000);
    CHECK_CLOSE(json_number(line, "scaling"), 18.4 / 18.5, 1e-8);
    CHECK(json_number(line, "data_ms") == 0.25);
    CHECK(json_number(line, "seconds") > 0);
    CHECK(*next_line(line) == 0);
    check_with_python(log_path);
}

static int empty_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    dtrain_metrics_info info;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.jsonl_path = log_path;
    if (!CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK)) return 1;
    dtrain_metrics_query(metrics, &info);
    CHECK(info.summary.steps == 0 && isnan(info.summary.first_loss) && isnan(info.summary.step_ms));
    CHECK(dtrain_metrics_step(metrics, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_metrics_step(NULL, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_OK);
    dtrain_metrics_destroy(metrics);
    CHECK(dtrain_metrics_finish(NULL) == DTRAIN_ERROR_ARGUMENT);
    dtrain_metrics_destroy(NULL);
    CHECK(dtrain_metrics_create(world, NULL, &metrics) == DTRAIN_ERROR_ARGUMENT);
    return 0;
}

/* A run that ends before its first step still leaves a file of JSON. */
static void test_no_steps(void)
{
    with_world(empty_rank, NULL);
    const char *end = next_line(read_back(log_path));
    CHECK(strncmp(end, "{\"final\": true, ", 16) == 0);
    CHECK(strstr(end, "\"step\": null, \"loss\": null") != NULL);
    check_with_python(log_path);
}

/* Takes a locale with a decimal comma: an installed one, or one that localedef compiles into `folder`. */
static bool take_comma_locale(const char *folder)
{
    static const char *const names[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "pt_BR.UTF-8"};
    char command[256];
    for (int i = 0; i < 3; i++)
        if (setlocale(LC_ALL, names[i])) return true;
    snprintf(command, sizeof command, "localedef -i de_DE -f UTF-8 %s/de_DE.UTF-8 >%s/log 2>&1",
             folder, folder);
    if (system(command) != 0) return false;
    setenv("LOCPATH", folder, 1);
    return setlocale(LC_ALL, "de_DE.UTF-8") != NULL;
}

static void test_locale(void)
{
    char folder[] = "/tmp/dtrain_locale_XXXXXX", half[8], command[64];
    CHECK(mkdtemp(folder) != NULL);
    if (take_comma_locale(folder)) {
        snprintf(half, sizeof half, "%.1f", 0.5);
        CHECK_MSG(strcmp(half, "0,5") == 0, "the locale has no decimal comma: %s", half);
        with_world(json_rank, NULL);
        setlocale(LC_ALL, "C");
        CHECK(json_number(next_line(read_back(log_path)), "loss") == 4.5);
        check_time(read_back(log_path), time(NULL) - 100);
        check_with_python(log_path);
    } else test_cannot("no locale with a decimal comma, and localedef makes none");
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK(system(command) == 0);
}

/* ---- files that fail ---- */

static int full_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.jsonl_path = "/dev/full"; /* its first line is lost: an error before training begins */
    CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_ERROR_FILE && !metrics);
    CHECK_MSG(strstr(dtrain_last_error(), "/dev/full cannot be written: No space left"), "%s",
              dtrain_last_error());
    return 0;
}

static void test_full_disk(void)
{
    if (access("/dev/full", W_OK) != 0) {
        test_cannot("no /dev/full here");
        return;
    }
    with_world(full_rank, NULL);
    CHECK(warnings == 0);
}

/* A disk that fills up inside a line and is then freed: only that line is lost, and nothing of it stays. */
static int limited_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    struct rlimit old, small;
    struct stat file;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.jsonl_path = log_path;
    if (!CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK)) return 1;
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    for (int64_t step = 0; step < 6; step++) {
        dtrain_step_record r = record_of(step);
        CHECK(stat(log_path, &file) == 0);
        small.rlim_cur = (rlim_t)file.st_size + 50;
        setrlimit(RLIMIT_FSIZE, step == 1 || step == 2 ? &small : &old);
        CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK);
        CHECK(warnings == (step > 0));
    }
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_ERROR_FILE);
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_OK); /* it has been done and reported */
    dtrain_metrics_destroy(metrics);
    CHECK(strstr(dtrain_last_error(), "2 of 7 records of /tmp/") != NULL);
    return 0;
}

static void test_torn_line(void)
{
    with_world(limited_rank, NULL);
    CHECK(warnings == 1 && strstr(warning, "cannot be written: File too large"));
    const char *line = next_line(read_back(log_path));
    CHECK(json_number(line, "step") == 0);
    for (int step = 3; step < 6; step++) {
        line = next_line(line);
        CHECK(line[0] == '{' && json_number(line, "step") == step);
    }
}

/* A pipe: without a reader it is refused, one that is full or has lost its reader costs lines, and nothing else. */
static int pipe_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    sigset_t waiting;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.jsonl_path = log_path;
    CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_ERROR_FILE);
    CHECK_MSG(strstr(dtrain_last_error(), "nobody reads this pipe"), "%s", dtrain_last_error());
    const int reader = open(log_path, O_RDONLY | O_NONBLOCK);
    if (!CHECK(reader >= 0 && dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK)) return 1;
    for (int64_t step = 0; step < 2000; step++) {
        dtrain_step_record r = record_of(step);
        if (step == 1900) close(reader);
        CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK);
    }
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_ERROR_FILE);
    dtrain_metrics_destroy(metrics);
    sigpending(&waiting);
    CHECK(!sigismember(&waiting, SIGPIPE));
    return 0;
}

static void test_pipe(void)
{
    unlink(log_path);
    if (!CHECK(mkfifo(log_path, 0600) == 0)) return;
    with_world(pipe_rank, NULL);
    CHECK_MSG(warnings == 1, "%d: %s", warnings, warning);
    unlink(log_path);
}

static int unopenable_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics = (dtrain_metrics *)1;
    (void)user;
    memset(&desc, 0, sizeof desc);
    desc.jsonl_path = "/nowhere/log.jsonl";
    CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_ERROR_FILE);
    CHECK(metrics == NULL);
    CHECK(strstr(dtrain_last_error(), "/nowhere/log.jsonl cannot be opened: No such file"));
    return 0;
}

static void test_unopenable(void) { with_world(unopenable_rank, NULL); }

/* ---- what a person sees ---- */

static int table_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    memset(&desc, 0, sizeof desc);
    desc.progress = (FILE *)user;
    desc.total_steps = 34;
    if (!CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK)) return 1;
    for (int64_t step = 0; step < 34; step++) {
        dtrain_step_record r = record_of(step + 1);
        if (step == 14) r.val_loss = 1.5;
        CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK);
    }
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_OK);
    dtrain_metrics_destroy(metrics);
    return 0;
}

/* Header, steps 1, 10, 15 (evaluated), 20, 30 and the last; one width, twelve words each. */
static void test_table(void)
{
    static const int shown[] = {1, 10, 15, 20, 30, 34};
    char path[80];
    snprintf(path, sizeof path, "%s.table", log_path);
    FILE *file = fopen(path, "w");
    with_world(table_rank, file);
    fclose(file);
    const char *line = read_back(path);
    size_t width = strcspn(line, "\n");
    CHECK(strstr(line, "step") && strstr(line, "val_loss"));
    for (int i = 0; i < 6; i++) {
        char word[16];
        int words = 0, step = 0, length = 0;
        line = next_line(line);
        CHECK(strcspn(line, "\n") == width);
        CHECK(sscanf(line, "%d", &step) == 1 && step == shown[i]);
        for (const char *at = line; at < line + width && sscanf(at, " %15s%n", word, &length) == 1;
             at += length) {
            words++;
            if (words == 3) CHECK(strcmp(word, step == 15 ? "1.5000" : "-") == 0);
            if (words == 6) CHECK(strcmp(word, "41.2k") == 0);
            if (words == 10) CHECK(strcmp(word, "0.250") == 0);
            if (words == 12) CHECK(atoi(word) == 100 * step / 34 && strchr(word, '%'));
        }
        CHECK_MSG(words == 12, "%d words", words);
        CHECK(strchr(line, '\r') == NULL && strchr(line, '\033') == NULL);
    }
    CHECK(*next_line(line) == 0);
    unlink(path);
}

static unsigned short columns; /* of the terminal */

static void set_width(int fd, int width)
{
    struct winsize size;
    memset(&size, 0, sizeof size);
    size.ws_col = (unsigned short)width, size.ws_row = 24;
    CHECK(ioctl(fd, TIOCSWINSZ, &size) == 0);
}

static int live_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    memset(&desc, 0, sizeof desc);
    desc.progress = (FILE *)user;
    desc.total_steps = 2000;
    if (!CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK)) return 1;
    for (int64_t step = 0; step < 1000; step++) {
        dtrain_step_record r = record_of(step);
        r.step = step + 1;
        if (step == 500) r.val_loss = 1.5;
        if (step == 700)
            set_width(fileno(desc.progress), columns / 2); /* a person narrows the window */
        CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK);
    }
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_OK);
    dtrain_metrics_destroy(metrics);
    return 0;
}

/* Tell whether `line` is the live line of a step of 2000: whole figures, as many as the terminal has room for. width: 0
 * if it is not known. */
static bool live_line_is(const char *line, int64_t step, const char *bar, int width)
{
    const dtrain_step_record r = record_of(step - 1);
    const int most = width ? width - 1 : 79, length = (int)strcspn(line, "\033");
    char parts[7][64], expected[200], eta[16] = "0:00"; /* as long as what is left out */
    const char *time_left = strstr(line, "  eta ");
    if (time_left) sscanf(time_left, "  eta %15[0-9:]", eta);
    sprintf(parts[0], "step %d/2000 %s%d%%", (int)step, bar, (int)step / 20);
    sprintf(parts[1], "  eta %s", eta);
    sprintf(parts[2], "  loss %.4f", r.loss);
    sprintf(parts[3], "  |g| %.3f", r.grad_norm);
    sprintf(parts[4], "  lr %.1e", r.lr);
    sprintf(parts[5], "  41.2k tok/s");
    sprintf(parts[6], "  %.1f ms", dtrain_record_value(&r, "step_ms"));
    if ((int)strlen(parts[0]) > most) parts[0][most] = 0; /* it alone may be cut in two */
    strcpy(expected, parts[0]);
    for (int i = 1; i < 7 && (int)(strlen(expected) + strlen(parts[i])) <= most; i++)
        strcat(expected, parts[i]);
    if (strlen(expected) + 13 <= (size_t)most)
        sprintf(expected + strlen(expected), "  data %.1f ms", dtrain_record_value(&r, "data_ms"));
    return length == (int)strlen(expected) && strncmp(line, expected, (size_t)length) == 0;
}

/* Draw on terminals of several widths, one that tells none among them. */
static void live_lines(int width)
{
    const int master = posix_openpt(O_RDWR | O_NOCTTY);
    char bar[16] = "", end[16] = "";
    CHECK(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0);
    const int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    columns = (unsigned short)width;
    set_width(slave, width);
    FILE *terminal = fdopen(dup(slave), "w");
    setenv("TERM", "xterm", 1);
    setenv("NO_COLOR", "1", 1);
    const double start = test_seconds();
    with_world(live_rank, terminal);
    const double elapsed = test_seconds() - start;
    fclose(terminal);
    close(slave); /* the last writer: reading ends with an error once everything has come */
    size_t used = 0;
    for (ssize_t got = 1; got > 0 && used<sizeof text - 1; used += got> 0 ? (size_t)got : 0)
        got = read(master, text + used, sizeof text - 1 - used);
    close(master);
    CHECK(used > 0);
    text[used] = 0;
    const int narrowed = width / 2;
    if (width == 0 || width >= 60) snprintf(bar, sizeof bar, "[>         ] ");
    if (width == 0 || narrowed >= 60) snprintf(end, sizeof end, "[=====>    ] ");
    CHECK_MSG(live_line_is(text + 1, 1, bar, width), "width %d: %.100s", width, text);
    CHECK(strstr(text, "\r\033[Kstep 501  loss 4.0000  val_loss 1.5000\r\n") != NULL);
    const char *last = strrchr(text, '\r');
    CHECK(last && strcmp(last, "\r\n") == 0 && memcmp(last - 3, "\033[K", 3) == 0);
    for (last--; *last != '\r'; last--) continue;
    CHECK_MSG(live_line_is(last + 1, 1000, end, narrowed), "width %d: %s", narrowed, last + 1);
    int redraws = 0;
    for (const char *at = text; (at = strstr(at, "\rstep ")) != NULL; at++) {
        redraws++;
        CHECK_MSG((strchr(at, '\033') - at) <= (width ? width : 80),
                  "a line wider than the terminal");
    }
    CHECK_MSG(redraws <= 3 + (int)(elapsed * 10), "%d redraws in %g s", redraws, elapsed);
}

static void test_live_line(void)
{
    static const int widths[] = {60, 120, 200, 80, 40, 20, 8, 0};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) live_lines(widths[i]);
}

static int terminal_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    memset(&desc, 0, sizeof desc);
    desc.progress = (FILE *)user;
    desc.total_steps = 4;
    if (!CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK)) return 1;
    for (int step = 0; step < 2; step++) {
        dtrain_step_record r;
        memset(&r, 0, sizeof r);
        r.step = step;
        r.val_loss = NAN;
        CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK);
    }
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_OK);
    dtrain_metrics_destroy(metrics);
    return 0;
}

/* What a terminal is sent, with TERM and NO_COLOR as given; NULL: unset. */
static const char *on_terminal(const char *term, const char *no_color)
{
    static char text[8192];
    const int master = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0);
    FILE *terminal = fopen(ptsname(master), "w");
    if (term) setenv("TERM", term, 1);
    else unsetenv("TERM");
    if (no_color) setenv("NO_COLOR", no_color, 1);
    else unsetenv("NO_COLOR");
    with_world(terminal_rank, terminal);
    fclose(terminal);
    size_t used = 0;
    for (ssize_t got = 1; got > 0; used += got > 0 ? (size_t)got : 0)
        got = read(master, text + used, sizeof text - 1 - used);
    text[used] = 0;
    close(master);
    return text;
}

static void test_terminals(void)
{
    const char *text = on_terminal("xterm", NULL);
    CHECK(strstr(text, "\033[32m[==>       ]\033[0m") && strstr(text, "\033[K"));
    text = on_terminal("xterm", "");
    CHECK(strstr(text, "\033[32m")); /* no-color.org: an empty one does not count */
    text = on_terminal("xterm", "1");
    CHECK(strstr(text, "[==>       ]") && !strstr(text, "\033[32m") && strstr(text, "\033[K"));
    text = on_terminal("dumb", NULL);
    CHECK(!strchr(text, '\033') && strstr(text, "val_loss"));
    text = on_terminal(NULL, NULL);
    CHECK(!strchr(text, '\033') && strstr(text, "val_loss"));
}

/* A console whose reader has gone costs its lines, and not the process. */
static int closed_rank(dtrain_world *world, void *user)
{
    int ends[2];
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    (void)user;
    memset(&desc, 0, sizeof desc);
    CHECK(pipe(ends) == 0);
    desc.progress = fdopen(ends[1], "w");
    desc.progress_every = 1;
    if (!CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK)) return 1;
    close(ends[0]);
    for (int step = 0; step < 3; step++) {
        dtrain_step_record r = record_of(step);
        CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK && warnings == 1);
    }
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_ERROR_FILE);
    dtrain_metrics_destroy(metrics);
    fclose(desc.progress);
    return 0;
}

static void test_closed_console(void)
{
    signal(SIGPIPE, SIG_DFL);
    warnings = 0;
    with_world(closed_rank, NULL);
}

/* Only rank 0 writes, whatever the others were told. */
static int quiet_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    dtrain_metrics_info info;
    char path[80];
    (void)user;
    memset(&desc, 0, sizeof desc);
    snprintf(path, sizeof path, "%s.%d", log_path, dtrain_world_rank(world));
    desc.jsonl_path = path;
    if (!CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK)) return 1;
    dtrain_step_record r = record_of(0);
    CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK);
    dtrain_metrics_query(metrics, &info); /* but all of them know */
    CHECK(info.summary.steps == 1 && info.summary.step_ms == 18.5);
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_OK);
    dtrain_metrics_destroy(metrics);
    CHECK((access(path, F_OK) == 0) == (dtrain_world_rank(world) == 0));
    unlink(path);
    return 0;
}

static void test_other_ranks_are_quiet(void)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = 3;
    CHECK(dtrain_launch(&desc, quiet_rank, NULL, NULL) == DTRAIN_OK);
}

static dtrain_tensor *no_loss(dtrain_tape *tape, void *user)
{
    (void)tape;
    (void)user;
    return NULL;
}

/* Ranks that train by themselves have a log of their own, which the first of them writes. */
static int half_rank(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world), half = rank / 2;
    float value = 1, grad = 0;
    char path[80];
    dtrain_param param;
    dtrain_strategy_desc how = {0};
    dtrain_trainer_desc training = {0};
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    (void)user;
    memset(&param, 0, sizeof param);
    memset(&desc, 0, sizeof desc);
    param.name = "w";
    param.value = &value;
    param.grad = &grad;
    param.count = 1;
    if (!CHECK(dtrain_comm_split(dtrain_world_comm(world), half, 0, &how.comm) == DTRAIN_OK))
        return 1;
    if (!CHECK(dtrain_strategy_create(world, &param, 1, &how, &training.strategy) == DTRAIN_OK))
        return 1;
    training.loss = no_loss;
    if (!CHECK(dtrain_trainer_create(world, &training, &desc.trainer) == DTRAIN_OK)) return 1;
    snprintf(path, sizeof path, "%s.%d", log_path, half);
    desc.jsonl_path = path;
    desc.histogram_every = 1;
    if (!CHECK_MSG(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK, "%s",
                   dtrain_last_error()))
        return 1;
    dtrain_step_record r = record_of(1);
    CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK);
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_OK);
    dtrain_metrics_destroy(metrics);
    if (rank % 2 == 0) {
        const char *line = read_back(path);
        CHECK(json_number(line, "ranks") == 2);
        CHECK(holds(line, "\"strategy\": \"ddp\""));
        CHECK(json_number(line, "replicas") == 2 && json_number(line, "parameters") == 1);
        CHECK(json_number(next_line(next_line(line)), "ranks") == 2);
        unlink(path);
    }
    dtrain_trainer_destroy(desc.trainer);
    dtrain_strategy_destroy(training.strategy);
    dtrain_comm_destroy(how.comm);
    return 0;
}

static void test_halves_of_a_world(void)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = 4;
    CHECK(dtrain_launch(&desc, half_rank, NULL, NULL) == DTRAIN_OK);
}

/* ---- summary ---- */

/* Waits that are rare and long: the means have them, where medians would say that there are none. The rate is what
 * was done in the time of all steps. */
static int summary_rank(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    dtrain_metrics_info info;
    double step_ms = 0, exposed_ms = 0, comm_ms = 0, data_ms = 0;
    int64_t finite = 0;
    (void)user;
    memset(&desc, 0, sizeof desc);
    if (!CHECK(dtrain_metrics_create(world, &desc, &metrics) == DTRAIN_OK)) return 1;
    for (int64_t step = 0; step < 3000; step++) {
        dtrain_step_record r = record_of(step);
        const double data = step == 2999 ? NAN : step % 50 == 0 ? 400 : 0;
        const double took =
            step < 1000 ? 1000 : 400 + (double)((step * 7919) % 101); /* 400..500, shuffled */
        const double exposed = step % 20 == 0 ? took / 4 : 0;
        r.figure_count = 0;
        add(&r, "time/data_ms", "ms", data);
        add(&r, "time/step_ms", "ms", took);
        add(&r, "time/exposed_comm_ms", "ms", exposed);
        add(&r, "time/comm_ms", "ms", exposed + 10);
        add(&r, "throughput/tokens_per_second", "", 1e6 / took);
        add(&r, "sent/comm_bytes", "bytes", 1000);
        step_ms += took;
        exposed_ms += exposed;
        comm_ms += exposed + 10;
        if (isfinite(data)) data_ms += data, finite++;
        CHECK(dtrain_metrics_step(metrics, &r) == DTRAIN_OK);
        if (step != 0) continue;
        dtrain_metrics_query(metrics, &info);
        CHECK(info.summary.step_ms == 1000 && info.summary.scaling == 0.75);
    }
    dtrain_metrics_query(metrics, &info);
    const dtrain_summary s = info.summary;
    CHECK_CLOSE(s.step_ms, step_ms / 3000, 1e-9);
    CHECK_CLOSE(s.exposed_comm_ms, exposed_ms / 3000, 1e-9);
    CHECK_CLOSE(s.comm_ms, comm_ms / 3000, 1e-9);
    CHECK_CLOSE(s.data_ms, data_ms / (double)finite, 1e-9);
    CHECK_CLOSE(s.scaling, 1 - exposed_ms / step_ms, 1e-12);
    CHECK_CLOSE(s.tokens_per_second, 3e9 / step_ms, 1e-6);
    CHECK(s.steps == 3000 && s.comm_bytes == 3000000 && s.tokens == 3000 * 512);
    CHECK(s.first_loss == 4.5 && isnan(s.val_loss));
    CHECK_CLOSE(s.last_loss, 1.501, 1e-12);
    CHECK(s.seconds >= 1.0 && s.seconds < 60); /* the first step says that it took one second */
    CHECK(dtrain_metrics_finish(metrics) == DTRAIN_OK);
    dtrain_metrics_destroy(metrics);
    return 0;
}

static void test_means(void) { with_world(summary_rank, NULL); }

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (!has_python()) SKIP(every_line_is_json, "no python3 to read it");
    snprintf(log_path, sizeof log_path, "/tmp/dtrain_test_metrics_%d", (int)getpid());
    RUN(test_json_lines);
    RUN(test_no_steps);
    RUN(test_locale);
    RUN(test_full_disk);
    RUN(test_torn_line);
    RUN(test_pipe);
    RUN(test_unopenable);
    RUN(test_table);
    RUN(test_live_line);
    RUN(test_terminals);
    RUN(test_closed_console);
    RUN(test_other_ranks_are_quiet);
    RUN(test_halves_of_a_world);
    RUN(test_means);
    unlink(log_path);
    return test_summary();
}
