//! The HTML page of a report: three figures and a dozen lines, the machine, one section per bench,
//! and the table of keys. All external text is escaped, and the style sheet is embedded in the
//! page.

use std::fmt::Write;

use memferry_bench::results::figure::Figure;
use memferry_bench::results::headline::{self, Line};
use memferry_bench::results::outcome::{Machine, Outcome};
use memferry_bench::results::summary_keys::Better;
use memferry_bench::results::{number, size};

use super::palette::Palette;
use super::{keys, plot};

const STYLE: &str = include_str!("style.css");

/// The complete page. `origin` is the text that says when the outcomes were measured.
pub(super) fn page(outcomes: &[Outcome], origin: &str, bars: bool) -> String {
    let mut body = header(origin);
    body.push_str(&opening(outcomes));
    for outcome in outcomes {
        body.push_str(&section(outcomes, outcome));
    }
    body.push_str(&keys::section(outcomes, bars));
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>Memferry: measured on this machine</title>\n<style>\n{STYLE}</style>\n</head>\n\
         <body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
}

/// Escapes text for elements and quoted attributes.
pub(super) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            _ => safe.push(c),
        }
    }
    safe
}

fn header(origin: &str) -> String {
    format!(
        "<header>\n<h1>Memferry <span>measured</span></h1>\n\
         <p class=\"lead\">Made by <code>memferry</code> {} {}. Every peer ran in the same run, \
         interleaved; points are medians, bands are quartiles, and a ratio is the median of the \
         ratios within rounds.</p>\n</header>\n",
        escape(env!("CARGO_PKG_VERSION")),
        escape(origin)
    )
}

/// The large figures, the machine below the last one, and the overview lines beside them.
fn opening(outcomes: &[Outcome]) -> String {
    let mut parts = Vec::new();
    let figures = headline::figures::figures(outcomes);
    let cuts: Vec<_> = figures.iter().map(|figure| figure.outcome.clone()).collect();
    for (headline, cut) in figures.iter().zip(&cuts) {
        let palette = Palette::new(&cuts, cut);
        for figure in Figure::of(&cut.rows) {
            parts.push(format!(
                "<figure><figcaption>{} <span>{}</span></figcaption>{}</figure>\n",
                escape(headline.title),
                escape(headline.detail),
                plot::draw(&figure, &palette)
            ));
        }
    }
    let last = parts.pop().unwrap_or_default();
    parts.push(format!("<div class=\"stack\">\n{last}{}</div>\n", machine(outcomes)));
    parts.push(lines_list(&headline::lines(outcomes)));
    format!("<div class=\"opening\">\n{}</div>\n", parts.concat())
}

fn lines_list(lines: &[Line]) -> String {
    const LONGEST: f64 = 8.0;
    if lines.is_empty() {
        return String::new();
    }
    let longest = lines.iter().filter_map(Line::bar).fold(2.0, f64::max).min(LONGEST);
    let peer = 100.0 / longest;
    let mut html = format!("<ol class=\"lines\" style=\"--peer:{peer:.1}%\">\n");
    for line in lines {
        let _ = write!(html, "<li>{}", escape(&line.text));
        if let Some(length) = line.bar().filter(|length| length.is_finite()) {
            let percent = (length / longest).clamp(0.0, 1.0) * 100.0;
            let _ = write!(
                html,
                "<span class=\"meter\"><span class=\"ours\" style=\"width:{percent:.1}%\"></span></span>"
            );
        }
        html.push_str("</li>\n");
    }
    html.push_str(
        "</ol>\n<p class=\"note\">The mark in a bar is the speed of the peer, or the whole copy.</p>\n",
    );
    format!("<div class=\"card\">\n<h2>In short</h2>\n{html}</div>\n")
}

/// The machine. If recorded runs come from several machines, each machine with its benches.
fn machine(outcomes: &[Outcome]) -> String {
    let mut machines: Vec<(&Machine, Vec<&str>)> = Vec::new();
    for outcome in outcomes {
        match machines.iter_mut().find(|(machine, _)| **machine == outcome.machine) {
            Some((_, benches)) => benches.push(&outcome.bench),
            None => machines.push((&outcome.machine, vec![&outcome.bench])),
        }
    }
    let mut html = String::new();
    for (machine, benches) in &machines {
        html.push_str("<dl class=\"facts\">\n");
        let mut add = |name: &str, text: &str| {
            let _ = writeln!(html, "<div><dt>{name}</dt><dd>{}</dd></div>", escape(text));
        };
        for (name, text) in machine.info() {
            add(name, &text);
        }
        if machines.len() > 1 {
            add("benches", &benches.join(", "));
        }
        html.push_str("</dl>\n");
    }
    html
}

fn section(all: &[Outcome], outcome: &Outcome) -> String {
    let palette = Palette::new(all, outcome);
    let bench = escape(&outcome.bench);
    let mut html = format!("<section id=\"{bench}\">\n<h2>{bench}</h2>\n");
    let (failed, absent) = outcome.failed_and_missing();
    for failure in failed {
        let _ = writeln!(
            html,
            "<p class=\"note\"><strong class=\"mark missed\">Failed:</strong> {}</p>",
            escape(failure)
        );
    }
    html.push_str("<div class=\"figures\">\n");
    for figure in Figure::of(&outcome.rows) {
        let _ = writeln!(
            html,
            "<figure><figcaption>{}</figcaption>{}</figure>",
            caption(&figure),
            plot::draw(&figure, &palette)
        );
    }
    html.push_str("</div>\n");
    if !absent.is_empty() {
        let missing = escape(&absent.join(", "));
        let _ =
            writeln!(html, "<p class=\"note\"><strong>Did not take part:</strong> {missing}</p>");
    }
    for note in &outcome.notes {
        let _ = writeln!(html, "<p class=\"note\">{}</p>", escape(note));
    }
    html.push_str(&raw_rows(outcome));
    html.push_str("</section>\n");
    html
}

/// The name of the figure, its size if there is only one, its unit and the better direction.
fn caption(figure: &Figure<'_>) -> String {
    let mut details = Vec::new();
    if let [bytes] = figure.sizes[..]
        && bytes > 0
    {
        details.push(size::format(bytes));
    }
    details.push(figure.unit.to_owned());
    match figure.unit {
        "GB/s" => details.push(Better::Higher.words().to_owned()),
        "ns" => details.push(Better::Lower.words().to_owned()),
        _ => {}
    }
    format!("{} <span>{}</span>", escape(figure.name), escape(&details.join(", ")))
}

fn raw_rows(outcome: &Outcome) -> String {
    if outcome.rows.is_empty() {
        return String::new();
    }
    let versions: Vec<_> =
        outcome.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let mut html = format!(
        "<details>\n<summary>All {} points</summary>\n<p class=\"note\">Versions: {}</p>\n\
         <div class=\"scroll\"><table>\n<thead><tr><th>figure</th><th>series</th>\
         <th class=\"n\">size</th><th class=\"n\">median</th><th class=\"n\">lower quartile</th>\
         <th class=\"n\">upper quartile</th><th>unit</th><th class=\"n\">rounds</th></tr></thead>\n\
         <tbody>\n",
        outcome.rows.len(),
        escape(&versions.join(", "))
    );
    for row in &outcome.rows {
        let _ = writeln!(
            html,
            "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n strong\">{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td></tr>",
            escape(&row.figure),
            escape(&row.series),
            if row.bytes == 0 { String::new() } else { size::format(row.bytes) },
            number::in_unit(row.value, &row.unit),
            number::in_unit(row.low, &row.unit),
            number::in_unit(row.high, &row.unit),
            escape(&row.unit),
            row.rounds
        );
    }
    html.push_str("</tbody></table></div>\n</details>\n");
    html
}

#[cfg(test)]
mod tests {
    use memferry_bench::results::outcome::Row;
    use memferry_bench::results::sample;

    use super::*;

    #[test]
    fn text_from_outside_cannot_become_markup() {
        assert_eq!(escape("<a href=\"x\">&'"), "&lt;a href=&quot;x&quot;&gt;&amp;&#39;");
        let mut outcome = sample::empty("<script>bench");
        outcome.rows = vec![
            Row::of_rounds("<script>figure", "<script>series", 64, "<script>unit", &[1.0]),
            Row::of_rounds("<script>figure", "<script>series", 128, "<script>unit", &[1.0]),
            Row::of_rounds("<script>bars", "<script>series", 0, "<script>unit", &[1.0]),
        ];
        outcome.summary.set("<script>key", 1.0);
        outcome.missing.push("<script>peer".to_owned());
        outcome.notes.push("<script>note".to_owned());
        outcome.versions.insert("<script>name".to_owned(), "<script>version".to_owned());
        outcome.machine.cpu = "<script>cpu".to_owned();
        let page = page(&[outcome], "<script>date", true);
        assert!(!page.contains("<script>"));
        assert!(page.contains("&lt;script&gt;note"));
    }

    #[test]
    fn a_failure_of_ours_is_not_taken_for_a_peer_that_is_not_installed() {
        let mut outcome = sample::empty("devices");
        outcome.missing = vec!["rayon".into(), "memferry nic (no card)".into()];
        let page = page(&[outcome], "on 2026-01-31", false);
        let failed = page.find("Failed:</strong> memferry nic (no card)</p>").unwrap();
        let absent = page.find("Did not take part:</strong> rayon</p>").unwrap();
        assert!(failed < absent);
    }

    #[test]
    fn the_page_needs_nothing_beside_itself() {
        let page = page(&sample::suite(), "on 2026-01-31", false);
        for outside in ["http://", "https://", "<script", "<link", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn every_bench_has_a_section_and_every_key_a_headline() {
        let suite = sample::suite();
        let page = page(&suite, "on 2026-01-31", true);
        for outcome in &suite {
            assert!(page.contains(&format!("<section id=\"{}\">", outcome.bench)));
            for (key, _) in outcome.summary.iter() {
                assert!(page.contains(&format!("<code>{key}</code>")), "{key}");
            }
        }
        assert!(page.contains("bars reached"));
    }

    #[test]
    fn a_page_opens_with_figures_and_lines_and_ends_with_the_keys() {
        let page = page(&sample::suite(), "on 2026-01-31", false);
        let at = |text: &str| page.find(text).unwrap_or_else(|| panic!("{text}"));
        assert!(at("Copies by size") < at("4 MiB copy: 25.0 GB/s, 2.31× memcpy"));
        assert!(at("<ol class=\"lines\"") < at("<section id=\"copy-latency\">"));
        assert!(at("<section id=\"pollution\">") < at("<section id=\"keys\">"));
        for mark in ["bars reached", "✓", "✗"] {
            assert!(!page.contains(mark), "{mark}");
        }
    }

    #[test]
    fn each_of_several_machines_is_shown_with_its_benches() {
        let mut other = sample::empty("gpu");
        other.machine.cores = 16;
        let page = page(&[sample::latency(), other], "from recorded runs", false);
        assert_eq!(page.matches("<dl class=\"facts\">").count(), 2);
        assert!(page.contains("<dt>benches</dt><dd>gpu</dd>"));
    }

    #[test]
    fn a_number_that_was_not_measured_is_drawn_as_nothing() {
        let mut outcome = sample::latency();
        outcome.rows.push(Row::of_rounds("hot", "memcpy", 1 << 30, "GB/s", &[]));
        outcome.rows.push(Row::of_rounds("idle", "memcpy", 0, "ns", &[]));
        outcome.summary.set("hot_4k_vs_memcpy", f64::NAN);
        let page = page(&[outcome], "on 2026-01-31", false);
        assert!(!page.contains("NaN") && !page.contains("inf"));
    }
}
