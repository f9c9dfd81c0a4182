/* Schedules as text, and as a drawing
 *
 * A line for the head, then one for each rank; an action is its name, chunk.micro-batch, and what
 * it has of :slot, /inbox and @peer:
 *
 *     1F1B ranks 2 chunks 1 micro-batches 1
 *     rank 0: F0.0:0 S0.0:0@1 RG0.0:0@1 B0.0:0 REDUCE0.0 STEP0.0
 *     rank 1: R0.0/0@0 F0.0:0/0 B0.0:0/0 SG0.0:0/0@0 REDUCE0.0 STEP0.0 */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "parallel/schedule_internal.h"

static const char *const dtrain__act_words[] = {"?", "F",  "B",  "W",      "S",
                                                "R", "SG", "RG", "REDUCE", "STEP"};

/* ---- Writing ----------------------------------------------------------------------------------*/

/* A text that goes into memory as far as there is any, and is counted in full. */
typedef struct dtrain__page_of_text {
    char *text;
    size_t bytes, used; /* used: without the 0 */
} dtrain__page_of_text;

DTRAIN__PRINTF(2, 3)
static void dtrain__page_add(dtrain__page_of_text *page, const char *format, ...)
{
    const size_t left = page->used < page->bytes ? page->bytes - page->used : 0;
    va_list args;
    va_start(args, format);
    const int written = vsnprintf(left ? page->text + page->used : NULL, left, format, args);
    va_end(args);
    if (written > 0) page->used += (size_t)written;
}

/* Say how many bytes a text takes; fail if there are fewer. */
static dtrain_result dtrain__page_end(const dtrain__page_of_text *page, size_t *needed,
                                      const char *call)
{
    if (needed) *needed = page->used + 1;
    if (!page->text || page->used < page->bytes) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: the text takes %zu bytes, and there are %zu",
                       call, page->used + 1, page->bytes);
}

DTRAIN_API dtrain_result dtrain_pipeline_print(const dtrain_pipeline_schedule *schedule, char *text,
                                               size_t bytes, size_t *needed)
{
    dtrain__page_of_text page = {text, text ? bytes : 0, 0};
    if (!schedule)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_pipeline_print: schedule is NULL");
    dtrain__page_add(&page, "%s ranks %d chunks %d micro-batches %d\n",
                     dtrain__pipeline_kind_name(schedule->kind), (int)schedule->ranks,
                     (int)schedule->chunks, (int)schedule->micro_batches);
    for (int r = 0; r < schedule->ranks; r++) {
        dtrain__page_add(&page, "rank %d:", r);
        for (size_t i = schedule->first[r]; i < schedule->first[r + 1]; i++) {
            const dtrain_pipeline_action *action = &schedule->actions[i];
            const uint32_t act = action->act <= DTRAIN_PIPELINE_ACT_STEP ? action->act : 0;
            dtrain__page_add(&page, " %s%d.%d", dtrain__act_words[act], (int)action->chunk,
                             (int)action->micro_batch);
            if (action->slot >= 0) dtrain__page_add(&page, ":%d", (int)action->slot);
            if (action->inbox >= 0) dtrain__page_add(&page, "/%d", (int)action->inbox);
            if (action->peer >= 0) dtrain__page_add(&page, "@%d", (int)action->peer);
        }
        dtrain__page_add(&page, "\n");
    }
    return dtrain__page_end(&page, needed, "dtrain_pipeline_print");
}

/* ---- Reading ----------------------------------------------------------------------------------*/

/* Step over a word, if it comes next. */
static bool dtrain__word(const char **at, const char *word)
{
    const size_t length = strlen(word);
    if (strncmp(*at, word, length) != 0) return false;
    *at += length;
    return true;
}

/* Read digits behind a word, up to 2^31 - 1. */
static bool dtrain__word_number(const char **at, const char *word, int32_t *number)
{
    int64_t value = 0;
    if (!dtrain__word(at, word) || **at < '0' || **at > '9') return false;
    for (; **at >= '0' && **at <= '9' && value <= INT32_MAX; (*at)++)
        value = 10 * value + (**at - '0');
    *number = (int32_t)value;
    return value <= INT32_MAX;
}

static bool dtrain__read_action(const char **at, dtrain_pipeline_action *action)
{
    action->slot = action->inbox = action->peer = -1;
    for (action->act = DTRAIN_PIPELINE_ACT_STEP; action->act > 0; action->act--) {
        const char *rest = *at; /* longer words first, as S is a part of SG */
        if (!dtrain__word_number(&rest, dtrain__act_words[action->act], &action->chunk)) continue;
        if (!dtrain__word_number(&rest, ".", &action->micro_batch)) return false;
        if (*rest == ':' && !dtrain__word_number(&rest, ":", &action->slot)) return false;
        if (*rest == '/' && !dtrain__word_number(&rest, "/", &action->inbox)) return false;
        if (*rest == '@' && !dtrain__word_number(&rest, "@", &action->peer)) return false;
        *at = rest;
        return true;
    }
    return false;
}

static bool dtrain__read_head(const char **at, dtrain_pipeline_schedule *schedule)
{
    for (schedule->kind = 0; schedule->kind <= DTRAIN_PIPELINE_ZBV; schedule->kind++)
        if (dtrain__word(at, dtrain__pipeline_kind_name(schedule->kind))) break;
    return schedule->kind <= DTRAIN_PIPELINE_ZBV &&
           dtrain__word_number(at, " ranks ", &schedule->ranks) &&
           dtrain__word_number(at, " chunks ", &schedule->chunks) &&
           dtrain__word_number(at, " micro-batches ", &schedule->micro_batches) &&
           dtrain__word(at, "\n");
}

/* Read the lines of all ranks; on an error *at is where it is. */
static bool dtrain__read_ranks(const char **at, dtrain_pipeline_schedule *schedule)
{
    size_t count = 0;
    for (int32_t r = 0, named; r < schedule->ranks; r++) {
        const char *line = *at;
        if (!dtrain__word_number(&line, "rank ", &named) || named != r || !dtrain__word(&line, ":"))
            return false;
        for (*at = line; **at == ' '; count++) {
            const char *next = *at + 1;
            if (!dtrain__read_action(&next, &schedule->actions[count])) return false;
            *at = next;
        }
        if (!dtrain__word(at, "\n")) return false;
        schedule->first[r + 1] = count;
    }
    return **at == 0;
}

/* Count a character in a text. */
static size_t dtrain__occurrences(const char *text, char what)
{
    size_t count = 0;
    for (; *text; text++) count += *text == what;
    return count;
}

/* Fail where reading has come to. */
static dtrain_result dtrain__read_fail(const char *text, const char *at)
{
    int line = 1;
    for (const char *c = text; c < at; c++) line += *c == '\n';
    return dtrain_fail(DTRAIN_ERROR_DATA,
                       "dtrain_pipeline_parse: line %d is not understood at \"%.*s\"; expected "
                       "\"KIND ranks P chunks V micro-batches M\", then for each rank \"rank R:\" "
                       "and its actions, as dtrain_pipeline_print writes them",
                       line, (int)strcspn(at, "\n") < 24 ? (int)strcspn(at, "\n") : 24, at);
}

DTRAIN_API dtrain_result dtrain_pipeline_parse(const char *text, dtrain_pipeline_schedule **out)
{
    const char *const call = "dtrain_pipeline_parse";
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    const char *at = text;
    dtrain_pipeline_schedule head;
    if (!text || !out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: an argument is NULL", call);
    *out = NULL;
    memset(&head, 0, sizeof head);
    if (!dtrain__read_head(&at, &head)) return dtrain__read_fail(text, at);
    /* What is allocated is bounded by the text, whatever the head says. */
    const size_t lines = dtrain__occurrences(at, '\n'), room = dtrain__occurrences(at, ' ');
    if (head.ranks < 1 || (size_t)head.ranks != lines ||
        (double)head.ranks * head.chunks * head.micro_batches > (double)room)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "%s: the first line announces %d ranks, %d chunks and %d micro-batches, "
                           "and %zu lines with at most %zu actions follow",
                           call, (int)head.ranks, (int)head.chunks, (int)head.micro_batches, lines,
                           room);
    dtrain_pipeline_schedule *schedule = dtrain__pipeline_alloc(&allocator, &head, room);
    if (!schedule) return DTRAIN_ERROR_MEMORY;
    dtrain_result result =
        dtrain__read_ranks(&at, schedule) ? DTRAIN_OK : dtrain__read_fail(text, at);
    if (result == DTRAIN_OK) result = dtrain_pipeline_check(schedule, NULL, 0, NULL);
    if (result == DTRAIN_OK) *out = schedule;
    else dtrain_pipeline_destroy(schedule);
    return result;
}

/* ---- Drawing ----------------------------------------------------------------------------------*/

/* Draw a rank up to a time, from where its line has come to: a name for each unit of time. */
static void dtrain__draw_until(dtrain__page_of_text *page, size_t *at, double end, size_t columns,
                               int width, const char *name)
{
    for (; *at < columns && (double)*at < end; ++*at)
        dtrain__page_add(page, " %-*s", *at + 1 < columns ? width : 0, name);
}

/* Draw a rank's computations; those of a later chunk have a dot and its number behind the
 * micro-batch. */
static void dtrain__draw_rank(const dtrain_pipeline_schedule *s, int rank, const double *ends,
                              size_t columns, dtrain__page_of_text *page)
{
    const int width = snprintf(NULL, 0, "F%d", (int)s->micro_batches - 1) +
                      (s->chunks > 1 ? 2 + (s->chunks > 10) : 0);
    size_t at = 0;
    dtrain__page_add(page, "rank %-3d", rank);
    for (size_t i = s->first[rank]; i < s->first[rank + 1]; i++) {
        const dtrain_pipeline_action *action = &s->actions[i];
        const bool both = action->act == DTRAIN_PIPELINE_ACT_BACKWARD;
        char name[40];
        if (action->act > DTRAIN_PIPELINE_ACT_WEIGHT) continue;
        const int used = snprintf(name, sizeof name, "%s%d", dtrain__act_words[action->act],
                                  (int)action->micro_batch);
        if (s->chunks > 1)
            snprintf(name + used, sizeof name - (size_t)used, ".%d", (int)action->chunk);
        const double begin = ends[i] - (both && !dtrain__pipeline_splits(s->kind) ? 2 : 1);
        dtrain__draw_until(page, &at, begin, columns, width, ".");
        dtrain__draw_until(page, &at, ends[i], columns, width, name);
    }
    dtrain__draw_until(page, &at, (double)columns, columns, width, ".");
    dtrain__page_add(page, "\n");
}

DTRAIN_API dtrain_result dtrain_pipeline_draw(const dtrain_pipeline_schedule *schedule, char *text,
                                              size_t bytes, size_t *needed)
{
    const dtrain_allocator allocator = dtrain__resolve_allocator(NULL);
    dtrain__page_of_text page = {text, text ? bytes : 0, 0};
    dtrain_pipeline_report report;
    DTRAIN__TRY(dtrain_pipeline_check(schedule, NULL, 0, &report));
    const size_t count = schedule->first[schedule->ranks];
    double *ends = (double *)dtrain__alloc(&allocator, count, sizeof *ends, "a drawing");
    if (!ends) return DTRAIN_ERROR_MEMORY;
    dtrain_result result = dtrain__pipeline_replay(schedule, NULL, 0, NULL, ends);
    for (int r = 0; r < schedule->ranks && result == DTRAIN_OK; r++)
        dtrain__draw_rank(schedule, r, ends, (size_t)report.makespan, &page);
    if (result == DTRAIN_OK) result = dtrain__page_end(&page, needed, "dtrain_pipeline_draw");
    dtrain__free(&allocator, ends, count, sizeof *ends);
    return result;
}
