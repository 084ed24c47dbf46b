//! `memferry top` in a terminal.

use std::time::Instant;

use anyhow::Context;

use super::columns::{self, Column};
use super::sample::{Row, Sample};
use super::terminal::{Key, Line, Style, Terminal};
use super::{details, no_process, read, signals};
use crate::args::{SortKey, TopArgs};

/// The state of the screen.
struct Screen {
    before: Option<Sample>,
    now: Sample,
    rows: Vec<Row>,
    sort: SortKey,
    /// The selected process, and its row.
    selected: Option<u32>,
    /// The process whose parts are shown.
    opened: Option<u32>,
    /// The first line of the view of a process.
    scroll: usize,
    paused: bool,
    /// Whether the list of columns is shown.
    shows_columns: bool,
}

/// What a key asks for.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Stay,
    Quit,
}

/// Shows processes until the user quits.
pub(super) fn run(args: &TopArgs) -> anyhow::Result<()> {
    let mut screen = Screen::new(read(args.pid)?, args);
    signals::catch();
    let mut terminal = Terminal::open().context("the terminal cannot be set up")?;
    let outcome = screen.show(&mut terminal, args);
    drop(terminal);
    signals::end();
    outcome
}

impl Screen {
    fn new(now: Sample, args: &TopArgs) -> Self {
        let rows = Row::all(None, &now);
        let mut screen = Self {
            before: None,
            now,
            rows,
            sort: args.sort,
            selected: args.pid,
            opened: args.pid,
            scroll: 0,
            paused: false,
            shows_columns: false,
        };
        screen.sort();
        screen
    }

    fn show(&mut self, terminal: &mut Terminal, args: &TopArgs) -> anyhow::Result<()> {
        let mut next = Instant::now() + args.interval;
        // The size that was drawn for, unless something has changed since.
        let mut drawn = None;
        while !signals::is_received() {
            let (width, height) = terminal.size();
            if drawn != Some((width, height)) {
                terminal.draw(&self.lines(width, height), width)?;
                drawn = Some((width, height));
            }
            let left = next.saturating_duration_since(Instant::now());
            if let Some(key) = terminal.key(left.min(signals::MAX_WAIT))? {
                drawn = None;
                if self.on_key(key) == Step::Quit {
                    return Ok(());
                }
            }
            if Instant::now() >= next {
                next = Instant::now() + args.interval;
                if !self.paused {
                    self.update(read(args.pid)?);
                    drawn = None;
                }
            }
        }
        Ok(())
    }

    fn update(&mut self, now: Sample) {
        self.before = Some(std::mem::replace(&mut self.now, now));
        self.rows = Row::all(self.before.as_ref(), &self.now);
        self.sort();
    }

    fn sort(&mut self) {
        columns::sort(&mut self.rows, self.sort);
        if !self.rows.iter().any(|row| Some(row.pid) == self.selected) {
            self.selected = self.rows.first().map(|row| row.pid);
        }
    }

    fn on_key(&mut self, key: Key) -> Step {
        match key {
            Key::Char('q') | Key::Interrupt => return Step::Quit,
            // What the list hides stays as it is.
            _ if self.shows_columns => self.shows_columns = false,
            Key::Char('?' | 'h') => self.shows_columns = true,
            Key::Escape if self.opened.is_none() => return Step::Quit,
            Key::Escape | Key::Backspace | Key::Left => self.opened = None,
            Key::Enter | Key::Right => (self.opened, self.scroll) = (self.selected, 0),
            Key::Down | Key::Char('j') => self.step(1),
            Key::Up | Key::Char('k') => self.step(-1),
            Key::PageDown => self.step(10),
            Key::PageUp => self.step(-10),
            Key::Char(' ' | 'p') => self.paused = !self.paused,
            Key::Char('s' | '>') => self.sort_by_neighbour(1),
            Key::Char('S' | '<') => self.sort_by_neighbour(-1),
            Key::Char(_) | Key::Other => {}
        }
        Step::Stay
    }

    /// Moves the selection, or the view of a process.
    fn step(&mut self, by: isize) {
        if self.opened.is_some() {
            self.scroll = self.scroll.saturating_add_signed(by);
            return;
        }
        let Some(last) = self.rows.len().checked_sub(1) else { return };
        let at = self.selected_row().saturating_add_signed(by).min(last);
        self.selected = Some(self.rows[at].pid);
    }

    fn selected_row(&self) -> usize {
        self.rows.iter().position(|row| Some(row.pid) == self.selected).unwrap_or(0)
    }

    fn sort_by_neighbour(&mut self, by: isize) {
        use clap::ValueEnum;
        let keys = SortKey::value_variants();
        let at = keys.iter().position(|key| *key == self.sort).unwrap_or(0) as isize;
        self.sort = keys[(at + by).rem_euclid(keys.len() as isize) as usize];
        self.sort();
    }

    /// The screen: a head, what was asked for, and at the bottom the keys.
    fn lines(&mut self, width: usize, height: usize) -> Vec<Line> {
        let body = height.saturating_sub(2);
        let mut lines = match self.opened {
            _ if self.shows_columns => column_lines(width),
            Some(pid) => self.process_lines(pid, body, width),
            None => self.table_lines(body, width),
        };
        lines.resize_with(body, Line::default);
        lines.insert(0, self.head());
        let keys = match self.opened {
            _ if self.shows_columns => "q quit  any other key: back",
            Some(_) => "q quit  Esc back  ↑↓ scroll  p pause  ? columns",
            None => "q quit  Enter open  ↑↓ select  s S sort  p pause  ? columns",
        };
        lines.push(Line::new(Style::Dim, keys));
        lines.truncate(height);
        lines
    }

    fn head(&self) -> Line {
        use clap::ValueEnum;
        let sort = self.sort.to_possible_value().map(|value| value.get_name().to_owned());
        let state = if self.paused { "  paused" } else { "" };
        let text = format!(
            "memferry top  {} {}  by {}{state}",
            self.rows.len(),
            if self.rows.len() == 1 { "process" } else { "processes" },
            sort.unwrap_or_default(),
        );
        Line::new(Style::Bold, text)
    }

    fn table_lines(&self, height: usize, width: usize) -> Vec<Line> {
        if self.rows.is_empty() {
            return vec![Line::from(no_process(None))];
        }
        let columns = columns::fitting(width);
        let visible = height.saturating_sub(1).max(1);
        let selected = self.selected_row();
        let first = (selected + 1).saturating_sub(visible);
        let head = std::iter::once(self.heading(&columns));
        let rows = self.rows.iter().enumerate().skip(first).take(visible).map(|(at, row)| {
            let style = if at == selected { Style::Reversed } else { Style::Plain };
            Line::new(style, format!("{:<width$}", columns::line(&columns, row)))
        });
        head.chain(rows).collect()
    }

    /// The titles, with the one that is sorted by underlined.
    fn heading(&self, columns: &[&Column]) -> Line {
        let titles = columns.iter().flat_map(|column| {
            let is_key = column.key == self.sort;
            let style = if is_key { Style::BoldUnderlined } else { Style::Bold };
            [(style, column.fit(column.title)), (Style::Plain, " ".into())]
        });
        Line(titles.collect())
    }

    fn process_lines(&mut self, pid: u32, height: usize, width: usize) -> Vec<Line> {
        let (Some(row), Some(process)) =
            (self.rows.iter().find(|row| row.pid == pid), self.now.process(pid))
        else {
            return vec![Line::from(no_process(Some(pid)))];
        };
        let columns = columns::fitting(width);
        let mut lines = vec![
            Line::new(Style::Bold, columns::heading(&columns)),
            Line::from(columns::line(&columns, row)),
        ];
        let before = self.before.as_ref();
        let seconds = before.map_or(1.0, |before| self.now.seconds_since(before));
        let earlier = before.and_then(|before| before.process(pid));
        for section in details::sections(earlier, process, seconds) {
            lines.push(Line::default());
            lines.push(Line::new(Style::Bold, section.title));
            let mut text = section.lines().into_iter();
            lines.extend(text.next().map(|head| Line::new(Style::Dim, head)));
            lines.extend(text.map(Line::from));
        }
        self.scroll = self.scroll.min(lines.len().saturating_sub(height));
        lines.into_iter().skip(self.scroll).collect()
    }
}

/// What the columns mean, in lines of a width.
fn column_lines(width: usize) -> Vec<Line> {
    const INDENT: usize = 10;
    let mut lines = Vec::new();
    for (title, meaning) in columns::meanings() {
        let mut line = format!("{title:<INDENT$}");
        for word in meaning.split(' ') {
            if line.chars().count() + word.chars().count() > width && line.len() > INDENT {
                lines.push(Line::from(std::mem::replace(&mut line, " ".repeat(INDENT))));
            }
            line.push_str(word);
            line.push(' ');
        }
        lines.push(Line::from(line));
    }
    lines
}

#[cfg(test)]
mod tests;
