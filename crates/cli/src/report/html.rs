//! The page of a report: machine, headline, one section per bench. Everything that comes from
//! outside is escaped on its way in, and the style sheet travels inside the page.

use std::fmt::Write;

use super::palette::Palette;
use super::plot;
use crate::figure::Figure;
use crate::outcome::Outcome;
use crate::summary_keys::{Better, Judged, Mark};
use crate::{number, size};

const STYLE: &str = include_str!("style.css");

/// The whole page.
pub(super) fn page(outcomes: &[Outcome], date: &str) -> String {
    let mut body = header(outcomes, date);
    body.push_str(&headline(outcomes));
    for outcome in outcomes {
        body.push_str(&section(outcomes, outcome));
    }
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>Memferry: measured on this machine</title>\n<style>\n{STYLE}</style>\n</head>\n\
         <body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
}

/// Makes text safe inside elements and quoted attributes.
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

fn header(outcomes: &[Outcome], date: &str) -> String {
    let mut html = format!(
        "<header>\n<h1>Memferry <span>measured on this machine</span></h1>\n\
         <p class=\"lead\">Made by <code>memferry bench</code> {} on {}. Every ratio compares with \
         a peer measured in the same run, turn about; points are medians, bands are quartiles. An \
         arrow shows which way is better.</p>\n",
        escape(env!("CARGO_PKG_VERSION")),
        escape(date)
    );
    if let Some(first) = outcomes.first() {
        html.push_str("<dl class=\"facts\">\n");
        for (name, text) in first.machine.facts() {
            let _ = writeln!(html, "<div><dt>{name}</dt><dd>{}</dd></div>", escape(&text));
        }
        html.push_str("</dl>\n");
    }
    html.push_str("</header>\n");
    html
}

fn headline(outcomes: &[Outcome]) -> String {
    let mut rows = String::new();
    let (mut reached, mut bars) = (0, 0);
    for outcome in outcomes {
        if outcome.summary.is_empty() {
            continue;
        }
        let bench = escape(&outcome.bench);
        let _ = writeln!(
            rows,
            "<tr class=\"group\"><th colspan=\"5\" scope=\"rowgroup\"><a href=\"#{bench}\">{bench}</a></th></tr>"
        );
        for (key, value) in outcome.summary.iter() {
            let judged = outcome.judge(key, value);
            reached += u32::from(judged.mark == Mark::Reached);
            bars += u32::from(matches!(judged.mark, Mark::Reached | Mark::Missed));
            rows.push_str(&headline_row(key, &judged));
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let count = match bars {
        0 => String::new(),
        _ => format!(" <span class=\"count\">{reached} of {bars} bars reached</span>"),
    };
    format!(
        "<section>\n<h2>Headline{count}</h2>\n<div class=\"scroll\"><table class=\"headline\">\n\
         <thead><tr><th>key</th><th class=\"n\">value</th><th class=\"n\">bar</th><th></th>\
         <th>meaning</th></tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n</section>\n"
    )
}

fn headline_row(key: &str, judged: &Judged) -> String {
    let class = match judged.mark {
        Mark::Reached => "mark reached",
        Mark::Missed => "mark missed",
        Mark::NotJudged(_) => "note",
        Mark::NoBar => "",
    };
    let way = judged.better.map_or(String::new(), |better| {
        format!("<span class=\"way\" title=\"{}\">{}</span>", better.words(), better.arrow())
    });
    format!(
        "<tr><td><code>{}</code></td><td class=\"n strong\">{}{way}</td><td class=\"n\">{}</td>\
         <td><span class=\"{class}\">{}</span></td><td class=\"meaning\">{}</td></tr>\n",
        escape(key),
        escape(&judged.value),
        escape(&judged.bar),
        judged.mark.text(),
        escape(judged.meaning)
    )
}

fn section(all: &[Outcome], outcome: &Outcome) -> String {
    let palette = Palette::new(all, outcome);
    let bench = escape(&outcome.bench);
    let mut html = format!("<section id=\"{bench}\">\n<h2>{bench}</h2>\n");
    let (failed, absent) = outcome.failed_and_absent();
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

/// The figure's name, its size if there is only one, its unit and which way is better.
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
    use super::*;
    use crate::outcome::Row;
    use crate::sample;

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
        let page = page(&[outcome], "<script>date");
        assert!(!page.contains("<script>"));
        assert!(page.contains("&lt;script&gt;note"));
    }

    #[test]
    fn a_failure_of_ours_is_not_taken_for_a_peer_that_is_not_installed() {
        let mut outcome = sample::empty("devices");
        outcome.missing = vec!["rayon".into(), "memferry nic (no card)".into()];
        let page = page(&[outcome], "2026-01-31");
        let failed = page.find("Failed:</strong> memferry nic (no card)</p>").unwrap();
        let absent = page.find("Did not take part:</strong> rayon</p>").unwrap();
        assert!(failed < absent);
    }

    #[test]
    fn the_page_needs_nothing_beside_itself() {
        let page = page(&sample::suite(), "2026-01-31");
        for outside in ["http://", "https://", "<script", "<link", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn every_bench_has_a_section_and_every_key_a_headline() {
        let suite = sample::suite();
        let page = page(&suite, "2026-01-31");
        for outcome in &suite {
            assert!(page.contains(&format!("<section id=\"{}\">", outcome.bench)));
            for (key, _) in outcome.summary.iter() {
                assert!(page.contains(&format!("<code>{key}</code>")), "{key}");
            }
        }
        assert!(page.contains("bars reached"));
    }

    #[test]
    fn a_number_that_was_not_measured_is_drawn_as_nothing() {
        let mut outcome = sample::latency();
        outcome.rows.push(Row::of_rounds("hot", "memcpy", 1 << 30, "GB/s", &[]));
        outcome.rows.push(Row::of_rounds("idle", "memcpy", 0, "ns", &[]));
        outcome.summary.set("hot_4k_vs_memcpy", f64::NAN);
        let page = page(&[outcome], "2026-01-31");
        assert!(!page.contains("NaN") && !page.contains("inf"));
    }
}
