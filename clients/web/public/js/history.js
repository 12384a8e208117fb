/** What the dashboard has heard in the last minutes. */

/** A pause in the snapshots that is longer than this is a gap in the lines. */
export const GAP_S = 4;
const MINUTE_S = 60;
/** Frontends take their snapshots at different moments, and the next connection may be another one's. */
const BEHIND_S = 10;

/**
 * Numbers of one moment: groups of numbers by name, null for what nothing is known of.
 *
 * @typedef {{at: number} & Record<string, any>} Snapshot
 * @typedef {{ageS: number, value: number | null}} Point
 */

export class History {
  /** @type {Snapshot[]} */
  #snapshots = [];

  #mostS;

  /** @param {number} mostS  how far it goes back */
  constructor(mostS) {
    this.#mostS = mostS;
  }

  /** How far back there is something to show, in whole minutes. */
  get spanS() {
    const ageS = this.nowS - (this.#snapshots[0]?.at ?? this.nowS);
    return ageS > 0 ? Math.min(this.#mostS, Math.ceil(ageS / MINUTE_S) * MINUTE_S) : MINUTE_S;
  }

  /**
   * @param {Snapshot} snapshot
   * @returns {boolean} whether it is news
   */
  add(snapshot) {
    if (snapshot.at <= this.nowS) {
      if (snapshot.at > this.nowS - BEHIND_S) return false;
      // The clock of a machine that was started again begins anew.
      this.#snapshots = [];
    }
    this.#snapshots.push(snapshot);
    const first = this.#snapshots.findIndex(({ at }) => at >= snapshot.at - this.#mostS);
    this.#snapshots.splice(0, first);
    return true;
  }

  /** The server's time at the newest one, in seconds. */
  get nowS() {
    return this.#snapshots.at(-1)?.at ?? -Infinity;
  }

  /** @returns {Snapshot | null} the newest one */
  get newest() {
    return this.#snapshots.at(-1) ?? null;
  }

  /**
   * @param {number} ageS
   * @returns {Snapshot | null} the one nearest to that age, if there is one near it
   */
  near(ageS) {
    const at = this.nowS - ageS;
    /** @type {Snapshot | null} */
    let found = null;
    for (const each of this.#snapshots) {
      if (!found || Math.abs(each.at - at) < Math.abs(found.at - at)) found = each;
    }
    return found && Math.abs(found.at - at) <= GAP_S / 2 ? found : null;
  }

  /**
   * @param {(snapshot: Snapshot) => number | null} value
   * @returns {Point[]} from the oldest to the newest
   */
  points(value) {
    const nowS = this.nowS;
    return this.#snapshots.map((each) => ({ ageS: nowS - each.at, value: value(each) }));
  }
}
