//! Operations of which more must be known at their end than the program's context: that they say
//! nothing if they go well, or that they own their memory. They are posted with a mark in place of the
//! context, which no other operation has.

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
    /// The memory of its message, if it has its own.
    #[expect(dead_code, reason = "held until the end, and used by nobody else")]
    pub(super) bytes: Option<Box<[u8]>>,
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

    /// The context of an operation, and whether it is quiet. It is forgotten, unless it goes on.
    pub(super) fn end(&self, mark: u64, is_last: bool) -> Option<(u64, bool)> {
        let place = (mark & !MARK) as usize;
        let mut places = self.places.lock().unwrap();
        let marked = places.all.get_mut(place)?;
        let Marked { context, is_quiet, takes_several, .. } = *marked.as_ref()?;
        if is_last || !takes_several {
            *marked = None;
            places.free.push(place);
        }
        Some((context, is_quiet))
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
        Marked { context, is_quiet: true, takes_several, bytes: None }
    }

    #[test]
    fn marks_are_found_by_their_context_until_the_end() {
        let marks = Marks::default();
        let (one, two) = (marks.add(marked(7, false)), marks.add(marked(8, true)));
        assert!(is_mark(one) && is_mark(two) && !is_mark(7));
        assert_eq!((marks.find(7), marks.find(8), marks.find(9)), (Some(one), Some(two), None));
        assert_eq!(marks.end(one, false), Some((7, true)));
        assert_eq!((marks.find(7), marks.end(one, false)), (None, None));
        assert_eq!(marks.end(two, false), Some((8, true)));
        assert_eq!(marks.end(two, true), Some((8, true)));
        assert_eq!(marks.end(two, true), None);
        assert!([one, two].contains(&marks.add(marked(9, false))));
    }
}
