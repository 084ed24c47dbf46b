//! Contests between invented contestants whose times are known beforehand.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;
use crate::bench::group::Fit;

/// Takes `once_ns` for an iteration until its luck runs out.
struct Invented {
    name: &'static str,
    once_ns: f64,
    orders_left: usize,
    diary: Rc<RefCell<Vec<&'static str>>>,
}

impl Contender for Invented {
    fn carry_out(&mut self, order: Order) -> Result<Timing, String> {
        self.orders_left = self.orders_left.checked_sub(1).ok_or("out of luck")?;
        self.diary.borrow_mut().push(self.name);
        Ok(Timing::of_messages(self.once_ns * order.iterations as f64))
    }

    fn fit(&mut self, _task: Task, slice_ns: f64) -> Result<Fit, String> {
        Ok(Fit::into(slice_ns, self.once_ns))
    }
}

type Diary = Rc<RefCell<Vec<&'static str>>>;

fn field(diary: &Diary, of: &[(&'static str, Role, f64, usize)]) -> Vec<Entry> {
    let entry = |&(name, role, once_ns, orders_left): &(&'static str, Role, f64, usize)| {
        let diary = Rc::clone(diary);
        let contender = Box::new(Invented { name, once_ns, orders_left, diary });
        Entry { series: name.to_owned(), role, contender }
    };
    of.iter().map(entry).collect()
}

const TASK: Task = Task::Pingpong { bytes: 8 };
const PATIENCE: Patience = Patience { rounds: 6, slice_ns: 1000.0, contest_ns: 1e9 };

#[test]
fn every_contestant_gets_one_turn_in_every_round() {
    let diary = Diary::default();
    let of = [("a", Role::Ours, 10.0, 99), ("b", Role::Peer, 20.0, 99), ("c", Role::Peer, 5.0, 99)];
    let (mut entries, mut missing) = (field(&diary, &of), Vec::new());
    let rounds = contest(&mut entries, &mut missing, |_| true, TASK, PATIENCE);
    let diary = diary.borrow();
    assert_eq!(diary.len(), 18);
    for round in diary.chunks(3) {
        let mut names = round.to_vec();
        names.sort_unstable();
        assert_eq!(names, ["a", "b", "c"]);
    }
    assert_eq!(diary[..6], ["a", "b", "c", "c", "b", "a"]);
    assert!(missing.is_empty());
    assert_eq!(rounds.against_best("a"), 0.5);
    assert_eq!(rounds.times_longer("a", "c"), 2.0);
    assert_eq!(rounds.median_ns("b"), 20.0);
    assert_eq!(rounds.values("b", |timing| timing.total_ns / 2.0), [10.0; 6]);
    assert!(rounds.values("d", |timing| timing.total_ns).is_empty());
}

#[test]
fn one_that_fails_is_named_and_the_others_go_on() {
    let diary = Diary::default();
    let of = [("a", Role::Ours, 10.0, 99), ("b", Role::Peer, 20.0, 3), ("c", Role::Peer, 30.0, 99)];
    let (mut entries, mut missing) = (field(&diary, &of), Vec::new());
    let rounds = contest(&mut entries, &mut missing, |_| true, TASK, PATIENCE);
    assert_eq!(missing, ["b (at pingpong 8: out of luck)"]);
    assert_eq!(entries.len(), 2);
    assert_eq!(rounds.against_best("a"), 3.0);
    let series: Vec<_> =
        rounds.rows("f", 8, "ns", |t| t.total_ns).into_iter().map(|row| row.series).collect();
    assert_eq!(series, ["a", "c"]);
}

#[test]
fn who_does_not_take_part_keeps_its_place_for_the_next_contest() {
    let diary = Diary::default();
    let of = [("a", Role::Ours, 10.0, 99), ("floor", Role::Floor, 1.0, 99)];
    let (mut entries, mut missing) = (field(&diary, &of), Vec::new());
    let rounds = contest(&mut entries, &mut missing, |series| series != "floor", TASK, PATIENCE);
    assert!(rounds.median_ns("floor").is_nan());
    assert_eq!(entries.len(), 2);
    let rounds = contest(&mut entries, &mut missing, |_| true, TASK, PATIENCE);
    assert_eq!(rounds.times_longer("a", "floor"), 10.0);
    assert!(rounds.against_best("a").is_nan(), "the floor is no peer");
}

#[test]
fn slow_contestants_get_fewer_rounds_but_never_too_few() {
    assert_eq!(PATIENCE.rounds_of(1.0), 6);
    assert_eq!(PATIENCE.rounds_of(1e9), 5);
    let long = Patience { rounds: 15, slice_ns: 1e7, contest_ns: 8e9 };
    assert_eq!(long.rounds_of(1e9), 8);
}

#[test]
fn iterations_grow_until_they_fill_a_slice() {
    struct Steady(f64, Vec<u64>);
    impl Contender for Steady {
        fn carry_out(&mut self, order: Order) -> Result<Timing, String> {
            self.1.push(order.iterations);
            Ok(Timing::of_messages(self.0 * order.iterations as f64))
        }
    }
    let mut quick = Steady(1000.0, Vec::new());
    assert_eq!(quick.fit(TASK, 10e6).unwrap().iterations, 10_000);
    assert!(quick.1.len() <= 4, "{:?}", quick.1);
    let mut slow = Steady(50e6, Vec::new());
    let fit = slow.fit(TASK, 10e6).unwrap();
    assert_eq!(fit, Fit { iterations: 1, once_ns: 50e6 });
    assert_eq!(fit.turn_ns(), 100e6);
    assert_eq!(slow.1, [1]);
}

#[test]
fn who_stands_aside_is_never_the_best_peer() {
    let diary = Diary::default();
    let of = [
        ("a", Role::Ours, 10.0, 99),
        ("b", Role::Peer, 20.0, 99),
        ("b over a", Role::Aside, 5.0, 99),
    ];
    let rounds = contest(&mut field(&diary, &of), &mut Vec::new(), |_| true, TASK, PATIENCE);
    assert_eq!(rounds.against_best("a"), 2.0);
    assert_eq!(rounds.times_longer("b", "b over a"), 4.0);
}
