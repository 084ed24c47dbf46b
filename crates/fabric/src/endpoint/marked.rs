//! Operations of which more must be known at their end than the program's context: that they say
//! nothing if they go well, that they have several parts, or that they own their memory. They are posted with a mark in place of the
//! context, which no other operation has.

use std::ffi::c_int;
use std::sync::Mutex;

/// The bit that tells marks from contexts. A program's context that has it is marked as well.
const MARK: u64 = 1 << 63;

/// What is known of a marked operation.
#[derive(Debug)]
pub(super) struct Marked {
    /// The program's.
    pub(super) context: u64,
    /// It says nothing if it goes well.
    pub(super) is_quiet: bool,
    /// It takes several messages.
    pub(super) takes_several: bool,
    /// How many ends it has, of which only the last is told.
    pub(super) parts: usize,
    /// How the first of those ended that did not end well.
    pub(super) code: c_int,
    /// The memory of its message, if it has its own.
    #[expect(dead_code, reason = "held until the end, and used by nobody else")]
    pub(super) bytes: Option<Box<[u8]>>,
}

impl Marked {
    /// An operation with one end.
    pub(super) fn new(context: u64, is_quiet: bool) -> Self {
        Self { context, is_quiet, takes_several: false, parts: 1, code: 0, bytes: None }
    }
}

#[derive(Debug, Default)]
pub(super) struct Marks {
    places: Mutex<Places>,
}

#[derive(Debug, Default)]
struct Places {
    all: Vec<Option<Marked>>,
    free: Vec<usize>,
}

#[inline]
pub(super) fn is_mark(context: u64) -> bool {
    context & MARK != 0
}

impl Marks {
    /// A mark for an operation.
    pub(super) fn add(&self, marked: Marked) -> u64 {
        let mut places = self.places.lock().unwrap();
        let place = places.free.pop().unwrap_or(places.all.len());
        if place == places.all.len() {
            places.all.push(Some(marked));
        } else {
            places.all[place] = Some(marked);
        }
        MARK | place as u64
    }

    /// A part of an operation has ended. The context of the operation, whether it is quiet, and how
    /// it ended; `None` if others are still to come. It is forgotten, unless it goes on.
    pub(super) fn end(&self, mark: u64, is_last: bool, code: c_int) -> Option<(u64, bool, c_int)> {
        let place = (mark & !MARK) as usize;
        let mut places = self.places.lock().unwrap();
        let marked = places.all.get_mut(place)?;
        let known = marked.as_mut()?;
        known.code = if known.code == 0 { code } else { known.code };
        known.parts -= 1;
        let Marked { context, is_quiet, takes_several, parts, code, .. } = *known;
        if takes_several {
            (known.parts, known.code) = (1, 0);
        } else if parts > 0 {
            return None;
        }
        if is_last || !takes_several {
            *marked = None;
            places.free.push(place);
        }
        Some((context, is_quiet, code))
    }

    /// An operation did not begin after all.
    pub(super) fn forget(&self, mark: u64) {
        let place = (mark & !MARK) as usize;
        let mut places = self.places.lock().unwrap();
        if places.all.get_mut(place).and_then(Option::take).is_some() {
            places.free.push(place);
        }
    }

    /// The mark of an operation with this context.
    pub(super) fn find(&self, context: u64) -> Option<u64> {
        let places = self.places.lock().unwrap();
        let is_it = |marked: &Option<Marked>| matches!(marked, Some(m) if m.context == context);
        places.all.iter().position(is_it).map(|place| MARK | place as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(context: u64, takes_several: bool) -> Marked {
        Marked { takes_several, ..Marked::new(context, true) }
    }

    #[test]
    fn marks_are_found_by_their_context_until_the_end() {
        let marks = Marks::default();
        let (one, two) = (marks.add(marked(7, false)), marks.add(marked(8, true)));
        assert!(is_mark(one) && is_mark(two) && !is_mark(7));
        assert_eq!((marks.find(7), marks.find(8), marks.find(9)), (Some(one), Some(two), None));
        assert_eq!(marks.end(one, false, 0), Some((7, true, 0)));
        assert_eq!((marks.find(7), marks.end(one, false, 0)), (None, None));
        assert_eq!(marks.end(two, false, 5), Some((8, true, 5)));
        assert_eq!(marks.end(two, true, 0), Some((8, true, 0)));
        assert_eq!(marks.end(two, true, 0), None);
        assert!([one, two].contains(&marks.add(marked(9, false))));
    }

    #[test]
    fn of_an_operation_in_parts_the_last_end_tells_what_went_wrong_first() {
        let marks = Marks::default();
        let mark = marks.add(Marked { parts: 3, ..Marked::new(7, false) });
        assert_eq!((marks.end(mark, false, 0), marks.end(mark, false, 5)), (None, None));
        assert_eq!(marks.end(mark, false, 6), Some((7, false, 5)));
        assert_eq!(marks.end(mark, false, 0), None);
    }
}
