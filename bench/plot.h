/* plot.h: charts as SVG: panels side by side with lines, both axes logarithmic or the y axis linear, or with
 * bars; a legend on the right. Include it behind <math.h>, <stdbool.h> and <stdio.h>.
 *
 *   plot p = {.x_low = 1, .x_high = 100, .y_low = 0, .y_high = 100, .y_step = 20};
 *   plot_open(&p, "out.svg", "title", "GPUs", "efficiency, %", 1)
 *   plot_panel(&p, "H100", marks, mark_count);
 *   plot_line(&p, 0, 0, x, y, count);            colour 0, dashes 0
 *   plot_point(&p, 0, x, y, "what a mouse shows");
 *   plot_legend(&p, 0, 0, "ddp");
 *   plot_close(&p)
 *
 * Bars: own_axes and a linear y axis that is set before each panel; the names below them need p.below pixels.
 *
 *   plot_bar_panel(&p, "GPT", names, name_count);
 *   plot_bar(&p, "#0072b2", 2, name_count, 0, 12.5, "parameters");       the third bar, from 0 to 12.5
 *   plot_bar_legend(&p, "#0072b2", "parameters"); */
#ifndef DTRAIN_PLOT_H
#define DTRAIN_PLOT_H

typedef struct plot {
    double x_low, x_high, y_low, y_high; /* what the axes show */
    double y_step; /* of a linear y axis; 0: logarithmic, a line for each factor of 2 */
    bool own_axes; /* each panel has a y axis of its own, with numbers */
    int below;     /* pixels for the names of bars; 0: there are numbers */
    FILE *file;
    const char *x_label;
    int legend_lines;           /* as many as will be added: the picture is high enough for them */
    int panel, panels, legends; /* panels made so far and to be made */
} plot;

enum { PLOT_WIDTH = 330, PLOT_HEIGHT = 270, PLOT_LEFT = 64, PLOT_TOP = 62, PLOT_GAP = 40 };

static inline double plot_x(const plot *p, double x)
{
    return p->x_high > p->x_low ? PLOT_WIDTH * log(x / p->x_low) / log(p->x_high / p->x_low)
                                : 0.5 * PLOT_WIDTH;
}

/* Values beyond the axis are drawn on its end. */
static inline double plot_y(const plot *p, double y)
{
    const double at = fmin(fmax(y, p->y_low), p->y_high);
    return PLOT_HEIGHT * (p->y_step > 0 ? (p->y_high - at) / (p->y_high - p->y_low)
                                        : log(p->y_high / at) / log(p->y_high / p->y_low));
}

/* Colours that differ in print and for the colour-blind (Okabe and Ito). */
static inline const char *plot_colour(int i)
{
    static const char *const colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                          "#e69f00", "#56b4e9", "#000000"};
    return colours[i % 7];
}

static inline const char *plot_dash(int i)
{
    static const char *const dashes[] = {"none", "8 4", "2 3", "10 3 2 3"};
    return dashes[i % 4];
}

/* false when the file cannot be written. */
static inline bool plot_open(plot *p, const char *path, const char *title, const char *x_label,
                             const char *y_label, int panels)
{
    const int width = PLOT_LEFT + panels * (PLOT_WIDTH + PLOT_GAP) + 230,
              panel = PLOT_HEIGHT + (p->below ? p->below : 62), legend = 20 * p->legend_lines + 10,
              height = PLOT_TOP + (legend > panel ? legend : panel);
    p->file = fopen(path, "w");
    p->x_label = x_label;
    p->panels = panels;
    p->panel = p->legends = 0;
    if (!p->file) return false;
    fprintf(p->file,
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %d' width='%d' height='%d' "
            "font-family='sans-serif' font-size='12'>\n<rect width='100%%' height='100%%' "
            "fill='#fff'/>\n<text x='%d' y='24' font-size='15'>%s</text>\n"
            "<text transform='translate(18 %d) rotate(-90)' text-anchor='middle'>%s</text>\n",
            width, height, width, height, PLOT_LEFT, title, PLOT_TOP + PLOT_HEIGHT / 2, y_label);
    return true;
}

/* Begin the next panel: its title, its frame, the lines and numbers of its y axis. */
static inline void plot__frame(plot *p, const char *title)
{
    FILE *f = p->file;
    fprintf(f, "%s<g transform='translate(%d %d)'>\n", p->panel ? "</g>\n" : "",
            PLOT_LEFT + p->panel * (PLOT_WIDTH + PLOT_GAP), PLOT_TOP);
    fprintf(f, "<text x='%d' y='-10' text-anchor='middle' font-weight='bold'>%s</text>\n",
            PLOT_WIDTH / 2, title);
    for (double y = p->y_low; y <= p->y_high; y = p->y_step > 0 ? y + p->y_step : 2 * y) {
        const double at = plot_y(p, y);
        fprintf(f, "<path d='M0 %.1fH%d' stroke='#e0e0e0'/>\n", at, PLOT_WIDTH);
        if (p->panel == 0 || p->own_axes)
            fprintf(f, "<text x='-6' y='%.1f' text-anchor='end'>%g</text>\n", at + 4, y);
    }
    fprintf(f, "<rect width='%d' height='%d' fill='none' stroke='#888'/>\n", PLOT_WIDTH,
            PLOT_HEIGHT);
    p->panel++;
}

/* Begin the next panel; `marks` are the numbers below its x axis. */
static inline void plot_panel(plot *p, const char *title, const double *marks, int count)
{
    FILE *f = p->file;
    plot__frame(p, title);
    for (int i = 0; i < count; i++)
        fprintf(f,
                "<path d='M%.1f %dv5' stroke='#888'/><text x='%.1f' y='%d' "
                "text-anchor='middle'>%g</text>\n",
                plot_x(p, marks[i]), PLOT_HEIGHT, plot_x(p, marks[i]), PLOT_HEIGHT + 18, marks[i]);
    fprintf(f, "<text x='%d' y='%d' text-anchor='middle'>%s</text>\n", PLOT_WIDTH / 2,
            PLOT_HEIGHT + 38, p->x_label);
}

/* Begin the next panel, of bars; `names` are what stands below them. */
static inline void plot_bar_panel(plot *p, const char *title, const char *const *names, int count)
{
    plot__frame(p, title);
    for (int i = 0; i < count; i++)
        fprintf(p->file,
                "<text transform='translate(%.1f %d) rotate(-40)' text-anchor='end' "
                "font-size='11'>%s</text>\n",
                (i + 0.5) * PLOT_WIDTH / count + 4, PLOT_HEIGHT + 14, names[i]);
}

/* Draw a piece of the bar at a place; `what` is what a mouse shows. */
static inline void plot_bar(const plot *p, const char *colour, int place, int places, double low,
                            double high, const char *what)
{
    const double room = (double)PLOT_WIDTH / places, top = plot_y(p, high);
    fprintf(p->file,
            "<rect x='%.1f' y='%.1f' width='%.1f' height='%.1f' "
            "fill='%s'><title>%s: %.1f</title></rect>\n",
            (place + 0.15) * room, top, 0.7 * room, plot_y(p, low) - top, colour, what, high - low);
}

/* Draw a mark across the bar at a place. */
static inline void plot_bar_mark(const plot *p, int place, int places, double y, const char *what)
{
    const double room = (double)PLOT_WIDTH / places;
    fprintf(p->file,
            "<path d='M%.1f %.1fh%.1f' stroke='#000' stroke-width='2'><title>%s: "
            "%.1f</title></path>\n",
            (place + 0.05) * room, plot_y(p, y), 0.9 * room, what, y);
}

static inline void plot_line(const plot *p, int colour, int dash, const double *x, const double *y,
                             int count)
{
    fprintf(p->file,
            "<polyline fill='none' stroke='%s' stroke-width='2' stroke-dasharray='%s' points='",
            plot_colour(colour), plot_dash(dash));
    for (int i = 0; i < count; i++)
        fprintf(p->file, "%.1f,%.1f ", plot_x(p, x[i]), plot_y(p, y[i]));
    fprintf(p->file, "'/>\n");
}

static inline void plot_point(const plot *p, int colour, double x, double y, const char *what)
{
    fprintf(
        p->file,
        "<circle cx='%.1f' cy='%.1f' r='4' fill='%s' stroke='#fff'><title>%s</title></circle>\n",
        plot_x(p, x), plot_y(p, y), plot_colour(colour), what);
}

/* Add a line to the legend; after the last panel. */
static inline void plot_legend(plot *p, int colour, int dash, const char *name)
{
    const int x = PLOT_WIDTH + 16, y = 10 + 20 * p->legends++;
    fprintf(p->file,
            "<path d='M%d %dh28' stroke='%s' stroke-width='2' stroke-dasharray='%s'/>"
            "<text x='%d' y='%d'>%s</text>\n",
            x, y, plot_colour(colour), plot_dash(dash), x + 34, y + 4, name);
}

static inline void plot_bar_legend(plot *p, const char *colour, const char *name)
{
    const int x = PLOT_WIDTH + 16, y = 10 + 20 * p->legends++;
    fprintf(p->file,
            "<rect x='%d' y='%d' width='28' height='12' fill='%s'/><text x='%d' y='%d'>%s</text>\n",
            x, y - 6, colour, x + 34, y + 4, name);
}

/* false when something could not be written. */
static inline bool plot_close(plot *p)
{
    fprintf(p->file, "%s</svg>\n", p->panel ? "</g>\n" : "");
    const bool good = !ferror(p->file);
    return (fclose(p->file) == 0) && good;
}

#endif
