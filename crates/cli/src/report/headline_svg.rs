//! The headline figure: messages and copies by size, as one SVG file for pages of any colour. It
//! has its own background and literal colours, because it has no style sheet.

use std::fmt::Write;

use anyhow::Context;
use memferry_bench::results::figure::Figure;
use memferry_bench::results::headline::figures::{self, HeadlineFigure};
use memferry_bench::results::outcome::Outcome;

use super::axis::{HEIGHT, WIDTH};
use super::html::escape;
use super::palette::Palette;
use super::plot;

const MARGIN: f64 = 28.0;
/// The space between the two panels.
const GUTTER: f64 = 36.0;
/// The height of the title and of two rows of legend above a panel.
const HEAD: f64 = 98.0;
/// The height of the line below the panels.
const FOOT: f64 = 40.0;
const FONT: f64 = 16.0;
/// The average width of a character of the legend.
const CHARACTER: f64 = 9.6;

const STYLE: &str = "\
text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;fill:#5c6675}\
.title{font-size:21px;font-weight:650;fill:#1b2230}.detail,.foot,.name{font-size:16px}\
.name{fill:#1b2230}.tick{font-size:15px}.end{text-anchor:end}.middle{text-anchor:middle}\
.grid{stroke:#e6e9ee}.axis,.notch{stroke:#98a2b1}.even{stroke:#98a2b1;stroke-dasharray:4 3}\
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.band{opacity:.13}.point *{stroke:#fff}";

/// The colours of the series, as in the style sheet of the report.
const COLOURS: [(&str, &str); 6] = [
    ("ours", "#d55e00"),
    ("peer0", "#0072b2"),
    ("peer1", "#009e73"),
    ("peer2", "#b0568a"),
    ("peer3", "#56b4e9"),
    ("peer4", "#6b7280"),
];

/// Draws the figure. It requires outcomes of both benches.
pub(super) fn draw(outcomes: &[Outcome]) -> anyhow::Result<String> {
    let messages = figures::messages(outcomes).context("the runs have no outcome of `pingpong`")?;
    let copies = figures::copies(outcomes).context("the runs have no outcome of `copy-latency`")?;
    let cuts = [copies.outcome.clone(), messages.outcome.clone()];
    let width = 2.0 * MARGIN + 2.0 * WIDTH + GUTTER;
    let height = MARGIN + HEAD + HEIGHT + FOOT;
    let machine = &copies.outcome.machine;
    let label = "Speed of messages and copies by size";
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\" aria-label=\"{label}\">\n<style>{STYLE}"
    );
    for (class, colour) in COLOURS {
        let weight = if class == "ours" { ";stroke-width:3" } else { "" };
        let _ = write!(
            svg,
            ".{class} .line{{stroke:{colour}{weight}}}.{class} .band,.{class} .point *{{fill:{colour}}}"
        );
    }
    let _ = writeln!(
        svg,
        "</style>\n<rect x=\"1\" y=\"1\" width=\"{}\" height=\"{}\" rx=\"14\" fill=\"#ffffff\" \
         stroke=\"#d5dae1\"/>",
        width - 2.0,
        height - 2.0
    );
    for (index, (figure, cut)) in
        [&messages, &copies].into_iter().zip([&cuts[1], &cuts[0]]).enumerate()
    {
        let left = MARGIN + index as f64 * (WIDTH + GUTTER);
        draw_panel(&mut svg, figure, &Palette::new(&cuts, cut), left);
    }
    let _ = writeln!(
        svg,
        "<text class=\"foot\" x=\"{MARGIN}\" y=\"{:.1}\">{}</text>\n</svg>",
        height - 16.0,
        escape(&format!(
            "{} cores of {}. Medians of interleaved rounds; bands are quartiles.",
            machine.cores, machine.cpu
        ))
    );
    Ok(svg)
}

fn draw_panel(svg: &mut String, headline: &HeadlineFigure, palette: &Palette<'_>, left: f64) {
    let all = Figure::of(&headline.outcome.rows);
    let Some(figure) = all.first() else { return };
    let _ = writeln!(
        svg,
        "<text class=\"title\" x=\"{left}\" y=\"{:.1}\">{}<tspan class=\"detail\" dx=\"10\" \
         font-weight=\"400\" fill=\"#5c6675\">{}</tspan></text>",
        MARGIN + 18.0,
        escape(headline.title),
        escape(headline.detail)
    );
    let (mut x, mut y) = (0.0, MARGIN + 34.0);
    for series in &figure.series {
        let needed = 42.0 + series.chars().count() as f64 * CHARACTER + 20.0;
        if x + needed - 20.0 > WIDTH {
            (x, y) = (0.0, y + 26.0);
        }
        let _ = writeln!(
            svg,
            "<g transform=\"translate({:.1} {y:.1})\">{}<text class=\"name\" x=\"42\" \
             y=\"{:.1}\">{}</text></g>",
            left + x,
            plot::legend_sample(&palette.style(series)),
            FONT * 0.72,
            escape(series)
        );
        x += needed;
    }
    let _ = writeln!(
        svg,
        "<g transform=\"translate({left} {:.1})\">{}</g>",
        MARGIN + HEAD,
        plot::curves(figure, palette)
    );
}

#[cfg(test)]
mod tests {
    use memferry_bench::results::outcome::Row;
    use memferry_bench::results::sample;

    use super::*;

    fn pingpong() -> Outcome {
        let mut outcome = sample::empty("pingpong");
        for bytes in [4096, 1 << 20] {
            for series in ["memferry", "UCX <1>"] {
                outcome.rows.push(Row::of_rounds("bandwidth", series, bytes, "GB/s", &[9.0]));
            }
        }
        outcome
    }

    #[test]
    fn the_figure_has_both_panels_and_its_own_background() {
        let svg = draw(&[sample::latency(), pingpong()]).unwrap();
        for part in ["Messages by size", "Copies by size", "UCX &lt;1&gt;", "fill=\"#ffffff\""] {
            assert!(svg.contains(part), "{part}");
        }
        assert!(!svg.contains("var(--"), "no style sheet comes with it");
    }

    #[test]
    fn a_run_without_messages_is_named() {
        let error = draw(&[sample::latency()]).unwrap_err().to_string();
        assert!(error.contains("`pingpong`"), "{error}");
    }
}
