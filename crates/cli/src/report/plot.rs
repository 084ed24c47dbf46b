//! Figures as SVG and HTML: lines if the size varies, bars otherwise. The style sheet of the page
//! defines colours and fonts by classes, so one drawing fits light and dark mode. A tooltip shows
//! the numbers of a point, without a script.

use std::fmt::Write;

use memferry_bench::results::figure::{Figure, is_memferry};
use memferry_bench::results::outcome::Row;
use memferry_bench::results::{number, size};

use super::axis::{BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, XAxis, YAxis};
use super::html::escape;
use super::palette::{Marker, Palette, Style};

const MARKER_RADIUS: f64 = 3.4;

/// Draws a figure with its legend.
pub(super) fn draw(figure: &Figure<'_>, palette: &Palette<'_>) -> String {
    if figure.is_curve() { lines(figure, palette) } else { bars(figure, palette) }
}

fn lines(figure: &Figure<'_>, palette: &Palette<'_>) -> String {
    format!(
        "{}<svg class=\"plot\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">{}</svg>",
        legend(figure, palette),
        escape(&format!("{} in {} over size", figure.name, figure.unit)),
        curves(figure, palette)
    )
}

/// Grid and lines, for a drawing of [`WIDTH`] by [`HEIGHT`].
pub(super) fn curves(figure: &Figure<'_>, palette: &Palette<'_>) -> String {
    let x = XAxis::over(figure);
    let y = YAxis::over(figure);
    let mut svg = String::new();
    draw_grid(&mut svg, &x, &y, figure.unit);
    // Memferry's series are drawn last, so that no peer covers them.
    let (ours, peers): (Vec<&str>, Vec<&str>) = figure.series.iter().partition(|s| is_memferry(s));
    for series in peers.into_iter().chain(ours) {
        draw_series(&mut svg, &figure.line(series), &palette.style(series), &x, &y);
    }
    svg
}

fn draw_grid(svg: &mut String, x: &XAxis, y: &YAxis, unit: &str) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for tick in &y.ticks {
        let at = y.position(*tick);
        // At a ratio of 1 the peer and Memferry are equal, so this grid line is emphasized.
        let class = if unit == "ratio" && *tick == 1.0 { "even" } else { "grid" };
        let label = if y.is_log { number::duration(*tick) } else { number::tick(*tick) };
        let _ = write!(
            svg,
            "<line class=\"{class}\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text class=\"tick end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LEFT - 8.0,
            at + 4.0,
            escape(&label)
        );
    }
    for exponent in x.ticks() {
        let at = x.exponent_position(f64::from(exponent));
        let _ = write!(
            svg,
            "<line class=\"notch\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{bottom}\" y2=\"{:.1}\"/>\
             <text class=\"tick middle\" x=\"{at:.1}\" y=\"{:.1}\">{}</text>",
            bottom + 4.0,
            bottom + 19.0,
            size::format(1 << exponent)
        );
    }
    let _ = write!(
        svg,
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{bottom}\" y2=\"{bottom}\"/>"
    );
}

fn draw_series(svg: &mut String, rows: &[&Row], style: &Style, x: &XAxis, y: &YAxis) {
    let path = |points: &mut dyn Iterator<Item = (u64, f64)>| {
        let places: Vec<_> = points
            .map(|(bytes, value)| format!("{:.1},{:.1}", x.position(bytes), y.position(value)))
            .collect();
        places.join(" ")
    };
    let whole_quartiles = rows.iter().all(|row| row.low.is_finite() && row.high.is_finite());
    let _ = write!(svg, "<g class=\"{}\">", style.class);
    if whole_quartiles && rows.len() > 1 {
        let upper = rows.iter().map(|row| (row.bytes, row.high));
        let lower = rows.iter().rev().map(|row| (row.bytes, row.low));
        let _ =
            write!(svg, "<polygon class=\"band\" points=\"{}\"/>", path(&mut upper.chain(lower)));
    }
    let _ = write!(
        svg,
        "<polyline class=\"line\"{} points=\"{}\"/>",
        dash_attribute(style),
        path(&mut rows.iter().map(|row| (row.bytes, row.value)))
    );
    for row in rows {
        let shape = marker(style.marker, x.position(row.bytes), y.position(row.value));
        let _ = write!(svg, "<g class=\"point\"><title>{}</title>{shape}</g>", escape(&tip(row)));
    }
    svg.push_str("</g>");
}

/// The tooltip of a point.
fn tip(row: &Row) -> String {
    let numbers = format!(
        "{} (quartiles {} to {}, {} rounds)",
        number::with_unit(row.value, &row.unit),
        number::with_unit(row.low, &row.unit),
        number::with_unit(row.high, &row.unit),
        row.rounds
    );
    match row.bytes {
        0 => format!("{}: {numbers}", row.series),
        bytes => format!("{}, {}: {numbers}", row.series, size::format(bytes)),
    }
}

fn marker(marker: Marker, x: f64, y: f64) -> String {
    let r = MARKER_RADIUS;
    let polygon = |corners: &[(f64, f64)]| {
        let points: Vec<_> =
            corners.iter().map(|(dx, dy)| format!("{:.1},{:.1}", x + dx * r, y + dy * r)).collect();
        format!("<polygon points=\"{}\"/>", points.join(" "))
    };
    match marker {
        Marker::Circle => format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{r}\"/>"),
        Marker::Square => polygon(&[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]),
        Marker::Triangle => polygon(&[(0.0, -1.25), (1.15, 0.85), (-1.15, 0.85)]),
        Marker::Diamond => polygon(&[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)]),
    }
}

fn dash_attribute(style: &Style) -> String {
    if style.dash.is_empty() {
        return String::new();
    }
    format!(" stroke-dasharray=\"{}\"", style.dash)
}

fn legend(figure: &Figure<'_>, palette: &Palette<'_>) -> String {
    let mut html = String::from("<ul class=\"legend\">");
    for series in &figure.series {
        let _ = write!(
            html,
            "<li><svg viewBox=\"0 0 34 12\" aria-hidden=\"true\">{}</svg>{}</li>",
            legend_sample(&palette.style(series)),
            escape(series)
        );
    }
    html.push_str("</ul>");
    html
}

/// A short line with a marker, for a legend drawing of 34 by 12 units.
pub(super) fn legend_sample(style: &Style) -> String {
    format!(
        "<g class=\"{}\"><polyline class=\"line\"{} points=\"1,6 33,6\"/>\
         <g class=\"point\">{}</g></g>",
        style.class,
        dash_attribute(style),
        marker(style.marker, 17.0, 6.0)
    )
}

fn bars(figure: &Figure<'_>, palette: &Palette<'_>) -> String {
    let drawable = || figure.rows().iter().filter(|row| row.value.is_finite());
    let longest = drawable().map(|row| row.value).fold(0.0, f64::max);
    let mut html = String::from("<div class=\"bars\">");
    for row in figure.rows() {
        let share = if row.value.is_finite() && longest > 0.0 { row.value / longest } else { 0.0 };
        let _ = write!(
            html,
            "<span class=\"name\">{}</span><span class=\"track\" title=\"{}\">\
             <span class=\"bar {}\" style=\"width:{:.1}%\"></span></span>\
             <span class=\"value\">{}</span>",
            escape(&row.series),
            escape(&tip(row)),
            palette.style(&row.series).class,
            share.clamp(0.0, 1.0) * 100.0,
            escape(&number::with_unit(row.value, &row.unit))
        );
    }
    html.push_str("</div>");
    html
}
